"""The picture of a results file: slow links on the left, slow ranks on the right.

``python -m benchmarks.gossip.picture benchmarks/results/gossip-<machine>.csv`` redraws it.
"""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.gossip import steps, stragglers
from benchmarks.gossip.trainers import ALONE, OSGP

Row = dict[str, str]
METHODS = [*steps.METHODS, *stragglers.METHODS]
NAMES = list(dict.fromkeys(method.name for method in METHODS if method is not ALONE))
COLORS = {name: f"C{number}" for number, name in enumerate(NAMES)}  # the same in all panels
FLOOR = 1 / (1 + (stragglers.SLOWER - 1) * stragglers.AtRandom().probability)


def of(rows: Sequence[Row], column: str) -> list[str]:
    """Return the distinct values of a column, in the order of the file."""
    return list(dict.fromkeys(row[column] for row in rows))


def draw_steps(axes: plt.Axes, rows: Sequence[Row], compute: str) -> None:
    """Draw ms per step of each method on each link as bars; lines: compute alone, round alone."""
    rows = [row for row in rows if row["compute"] == compute]
    cases = of(rows, "case")
    times = {(row["case"], row["method"]): float(row["median_ms"]) for row in rows}
    methods = [name for name in of(rows, "method") if name not in (ALONE.name, steps.ROUND_ALONE)]
    width = 0.8 / len(methods)
    for number, method in enumerate(methods):
        positions = [
            index + (number - (len(methods) - 1) / 2) * width for index in range(len(cases))
        ]
        heights = [times[case, method] for case in cases]
        axes.bar(positions, heights, 0.92 * width, label=method, color=COLORS[method])
        for position, height in zip(positions, heights, strict=True):
            axes.annotate(f"{height:.0f}", (position, height), ha="center", va="bottom", fontsize=6)
    for name, style in ((ALONE.name, "-"), (steps.ROUND_ALONE, ":")):
        levels = [times[case, name] for case in cases]
        left, right = ([index + side for index in range(len(cases))] for side in (-0.45, 0.45))
        axes.hlines(levels, left, right, color="black", linestyles=style, lw=1.2, label=name)
    hidden = {row["case"]: row["hidden"] for row in rows if row["method"] == OSGP.name}
    labels = [f"{case}\nOSGP hides {float(hidden[case]):.0%}" for case in cases]
    axes.set_xticks(range(len(cases)), labels, fontsize=8)
    axes.set_ylabel("ms per step, slowest rank")
    axes.set_title(f"compute: {compute}", fontsize=9)
    axes.legend(fontsize=7, frameon=False)


def draw_stragglers(axes: plt.Axes, rows: Sequence[Row]) -> None:
    """Draw the fraction of its speed without stragglers that each method keeps, as bars."""
    methods, cases = of(rows, "method"), of(rows, "case")[1:]
    kept = {(row["case"], row["method"]): float(row["ratio"]) for row in rows}
    width = 0.8 / len(methods)
    for number, method in enumerate(methods):
        positions = [
            index + (number - (len(methods) - 1) / 2) * width for index in range(len(cases))
        ]
        heights = [kept[case, method] for case in cases]
        axes.bar(positions, heights, 0.92 * width, label=method, color=COLORS[method])
        for position, height in zip(positions, heights, strict=True):
            axes.annotate(f"{height:.2f}", (position, height), ha="center", va="bottom", fontsize=7)
    axes.axhline(1, color="0.8", lw=0.8, zorder=0)
    axes.hlines(FLOOR, len(cases) - 1.45, len(cases) - 0.55, color="black", linestyles=":", lw=1.2)
    axes.annotate("no waiting", (len(cases) - 0.55, FLOOR), ha="right", va="bottom", fontsize=7)
    axes.set_xticks(range(len(cases)), [case.replace(" with", "\nwith") for case in cases])
    axes.set_ylim(0, 1.25)
    axes.set_ylabel("speed kept by the other ranks, of no straggler")
    axes.set_title(f"stragglers, compute: {rows[0]['compute']}", fontsize=9)
    axes.legend(fontsize=7, frameon=False, ncols=2)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture of the parts in the file."""
    timed = [row for row in rows if row["part"] == "steps"]
    slowed = [row for row in rows if row["part"] == "stragglers"]
    computes = of(timed, "compute")
    panels = len(computes) + bool(slowed)
    figure, axes = plt.subplots(1, panels, figsize=(6 * panels, 4.6), layout="constrained")
    axes = [axes] if panels == 1 else list(axes)
    for compute in computes:
        draw_steps(axes.pop(0), timed, compute)
    if slowed:
        draw_stragglers(axes.pop(0), slowed)
    row = rows[0]
    figure.suptitle(f"{path.stem}: 4 gloo processes, torch {row['torch']}", fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(path: Path) -> None:
    with path.open(newline="") as file:
        draw(list(csv.DictReader(file)), path.with_suffix(".png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
