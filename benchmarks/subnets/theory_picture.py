"""The picture of compare_sketches.py's rows."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from benchmarks.harness.rows import Row

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

COLORS = {
    "whole": "0.35",
    "plain": "tab:orange",
    "preconditioned": "tab:green",
    "heterogeneous": "tab:blue",
}
LABELS = {
    "whole": "no sketch: gradient descent",
    "plain": "PermK",
    "preconditioned": "PermK, preconditioned",
    "heterogeneous": "HeterogeneousPermK",
}
DASHES = ["-", "--", ":", "-."]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw distances to the solution and to each sketch's limit, a column per number of ranks."""
    sizes = sorted({int(row["ranks"]) for row in rows})
    steps = sorted({float(row["relative_step"]) for row in rows}, reverse=True)
    figure, panels = plt.subplots(
        2, len(sizes), figsize=(1.5 + 3.6 * len(sizes), 7), layout="constrained",
        squeeze=False, sharex=True, sharey="row",
    )  # fmt: skip
    for column, size in enumerate(sizes):
        those = [row for row in rows if int(row["ranks"]) == size]
        draw_to_solution(panels[0][column], those, steps)
        draw_to_limit(panels[1][column], those, steps)
        panels[0][column].set_title(f"{size} ranks", fontsize=10)
        panels[1][column].set_xlabel("round")
    panels[0][0].set_ylabel("distance to the solution $x^*$ / $|x^*|$")
    panels[1][0].set_ylabel("distance to the sketch's limit $x^\\infty$ / $|x^\\infty|$")
    key(figure, sorted({row["sketch"] for row in rows}, key=list(COLORS).index), steps)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_to_solution(axes: plt.Axes, rows: Sequence[Row], steps: Sequence[float]) -> None:
    for row in rows:
        plot(axes, row, "to_solution_at", steps)
    for sketch in {row["sketch"]: row for row in rows if row["sketch"] != "whole"}.values():
        color, height = COLORS[sketch["sketch"]], float(sketch["limit_to_solution"])
        axes.axhline(height, color=color, linewidth=5, alpha=0.2)
    axes.set_ylim(0.05, 2)
    finish(axes)


def draw_to_limit(axes: plt.Axes, rows: Sequence[Row], steps: Sequence[float]) -> None:
    for row in rows:
        if row["sketch"] != "whole":
            plot(axes, row, "to_limit_at", steps)
    finish(axes)


def plot(axes: plt.Axes, row: Row, field: str, steps: Sequence[float]) -> None:
    rounds = [int(each) for each in row["rounds"].split()]
    values = [float(each) for each in row[field].split()]
    dash = DASHES[steps.index(float(row["relative_step"])) % len(DASHES)]
    axes.plot(rounds, values, dash, color=COLORS[row["sketch"]], linewidth=1.5)


def finish(axes: plt.Axes) -> None:
    axes.set_xscale("symlog", linthresh=1, linscale=0.3)
    axes.set_xlim(0)
    axes.xaxis.set_major_formatter(mpl.ticker.ScalarFormatter())
    axes.set_yscale("log")
    axes.grid(alpha=0.3)


def key(figure: plt.Figure, sketches: Sequence[str], steps: Sequence[float]) -> None:
    """Add a legend of colors and dashes."""
    lines = [Line2D([], [], color=COLORS[each], label=LABELS[each]) for each in sketches]
    lines += [
        Line2D(
            [],
            [],
            color="black",
            linestyle=DASHES[index % len(DASHES)],
            label=f"{step:g} of the largest step",
        )
        for index, step in enumerate(steps)
    ]
    lines.append(
        Line2D(
            [], [], color="0.5", linewidth=5, alpha=0.4, label="distance of $x^\\infty$ to $x^*$"
        )
    )
    figure.legend(handles=lines, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
