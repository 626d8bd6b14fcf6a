"""The picture of a results file: step times of all windows, and the effect of a straggler.

``python -m benchmarks.interlocking.picture benchmarks/results/interlocking-<machine>.csv``
draws it again.
"""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.pipeline.picture import Row, label_systems, of

COLORS = {
    "Interlocking, window 1": "#08519c",
    "Interlocking, window 2": "#3182bd",
    "Interlocking, window 3": "#6baed6",
    "Interlocking, window 4": "#9ecae1",
    "OneForwardOneBackward": "#d55e00",
    "torch 1F1B": "0.6",
    "PipeOptim": "#009e73",
}


def color(system: str) -> str:
    """Return the color of a system, the same in all panels."""
    return COLORS.get(system, "black")


def draw_steps(axes: plt.Axes, rows: Sequence[Row], case: str) -> None:
    """Draw bars: the median step time, with lines from the 20th to the 80th percentile."""
    rows = [row for row in rows if row["case"] == case]
    places = range(len(rows))
    medians = [float(row["median_ms"]) for row in rows]
    below = [float(row["median_ms"]) - float(row["p20_ms"]) for row in rows]
    above = [float(row["p80_ms"]) - float(row["median_ms"]) for row in rows]
    colors = [color(row["system"]) for row in rows]
    axes.barh(places, medians, color=colors, xerr=(below, above), error_kw={"lw": 1})
    for place, (row, median) in enumerate(zip(rows, medians, strict=True)):
        text = f"{median:.0f} ms, {float(row['ratio']):.2f}x"
        axes.annotate(text, (0.02 * max(medians), place), va="center", fontsize=7, color="white")
    axes.set_xlabel("ms per step; x: speed relative to OneForwardOneBackward", fontsize=8)
    label_systems(axes, rows, f"{rows[0]['ranks']} stages that sleep, {case}")


def draw_straggler(axes: plt.Axes, rows: Sequence[Row]) -> None:
    """Draw the first stage's step times, from the step before the last stage is slow."""
    for system in of(rows, "system"):
        own = [row for row in rows if row["system"] == system]
        steps = [int(row["case"].removeprefix("step t") or 0) for row in own]
        times = [float(row["median_ms"]) for row in own]
        line = "o--" if system == "OneForwardOneBackward" else "o-"  # may hide others
        axes.plot(steps, times, line, color=color(system), label=system, ms=4, lw=1.4)
    axes.axvspan(-0.1, steps[-1] + 0.1, color="0.95", zorder=0)
    axes.set_xticks(steps, [f"t{step:+d}" if step else "t" for step in steps])
    highest = max(float(row["median_ms"]) for row in rows)
    axes.set(ylabel="ms", ylim=(0, 1.45 * highest))
    axes.set_xlabel("step; gray: the last stage's backward is slow", fontsize=8)
    axes.set_title("steps of the first stage, M = 1", fontsize=9)
    axes.legend(fontsize=7, frameon=False, ncols=2, loc="upper left")


def draw_cotangents(axes: plt.Axes, rows: Sequence[Row]) -> None:
    """Draw bars: the time together relative to one after the other."""
    rows = [row for row in rows if row["system"] == "together"]
    ratios = [float(row["ratio"]) for row in rows]
    axes.barh(range(len(rows)), ratios, color="#6baed6")
    for place, row in enumerate(rows):
        text = f"{row['case']}: {float(row['ratio']):.2f}, {float(row['median_ms']):.2f} ms"
        axes.annotate(text, (0.02, place), va="center", fontsize=7)
    axes.axvline(1, color="black", lw=1)
    names = [row["compute"].removesuffix(", 1 thread").replace(", ", "\n", 1) for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("time, relative to one after the other", fontsize=8)
    axes.set_title("gradients propagated together", fontsize=9)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the parts that the file has."""
    parts = {part: [row for row in rows if row["part"] == part] for part in of(rows, "part")}
    cases = of(parts.get("windows", []), "case")
    others = [each for each in (draw_straggler, draw_cotangents) if name_of(each) in parts]
    columns = max(len(cases), len(others))
    lines = bool(cases) + bool(others)
    figure, grid = plt.subplots(
        lines, columns, figsize=(5.5 * columns, 3.6 * lines), layout="constrained", squeeze=False
    )
    for axes in grid.flat:
        axes.axis("off")
    for axes, case in zip(grid[0], cases, strict=False):
        axes.axis("on")
        draw_steps(axes, parts["windows"], case)
    for axes, draw_part in zip(grid[-1], others, strict=False):
        axes.axis("on")
        draw_part(axes, parts[name_of(draw_part)])
    figure.suptitle(f"{path.stem}: gloo processes, torch {rows[0]['torch']}", fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def name_of(draw_part: object) -> str:
    """Return the part that a function draws."""
    return {draw_straggler: "straggler", draw_cotangents: "cotangents"}[draw_part]


def main(path: Path) -> None:
    with path.open(newline="") as file:
        draw(list(csv.DictReader(file)), path.with_suffix(".png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
