"""The picture of a results file: throughput of computing stages, bubbles of sleeping ones.

``python -m benchmarks.pipeline.picture benchmarks/results/pipeline-<machine>.csv`` draws it again.
"""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.pipeline.limit import Limit

Row = dict[str, str]
OURS, TORCH = "C0", "0.6"


def of(rows: Sequence[Row], column: str) -> list[str]:
    """Return the distinct values of a column, in the order of the file."""
    return list(dict.fromkeys(row[column] for row in rows))


def color(system: str) -> str:
    """Return the color of a system; torch's are gray."""
    return TORCH if system.startswith("torch ") else OURS


def draw_throughput(axes: plt.Axes, rows: Sequence[Row], case: str) -> None:
    """Draw bars: the fraction of the limit that each system reaches."""
    rows = [row for row in rows if row["case"] == case and row["system"] != Limit.name]
    places = range(len(rows))
    shares = [float(row["of_limit"]) for row in rows]
    axes.barh(places, shares, color=[color(row["system"]) for row in rows])
    for place, row in zip(places, rows, strict=True):
        label = f"{int(row['tokens_per_s']):,} tokens/s "
        axes.annotate(label, (shares[place], place), ha="right", va="center", fontsize=6)
    axes.axvline(1, color="black", lw=1)
    axes.set_xlim(0, 1.05)
    axes.set_xlabel("speed, relative to computing without waiting or messages")
    label_systems(axes, rows, f"{rows[0]['ranks']} stages that compute, {case}")


def draw_bubbles(axes: plt.Axes, rows: Sequence[Row], case: str) -> None:
    """Draw the measured bubbles as bars, the simulated ones as marks."""
    rows = [row for row in rows if row["case"] == case]
    places = range(len(rows))
    colors = [color(row["system"]) for row in rows]
    axes.barh(places, [float(row["bubble"]) for row in rows], color=colors, label="measured")
    simulated = [float(row["bubble_on_paper"]) for row in rows]
    axes.plot(simulated, places, "k|", ms=11, mew=1.5, label="simulated")
    axes.set_xlim(left=0)
    axes.set_xlabel("bubble: idle fraction of all ranks' time")
    axes.legend(fontsize=7, frameon=False)
    label_systems(axes, rows, f"stages that sleep, {case}")


def label_systems(axes: plt.Axes, rows: Sequence[Row], title: str) -> None:
    """Label the bars with their systems, the first on top."""
    axes.set_yticks(range(len(rows)), [row["system"] for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=9)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the parts that the file has."""
    parts = [
        (draw_part, [row for row in rows if row["part"] == part])
        for part, draw_part in (("throughput", draw_throughput), ("bubbles", draw_bubbles))
    ]
    panels = [
        (draw_part, of_part, case) for draw_part, of_part in parts for case in of(of_part, "case")
    ]
    columns = max(len(of(of_part, "case")) for _, of_part in parts)
    lines = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(5.5 * columns, 3.6 * lines), layout="constrained", squeeze=False
    )
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    for axes, (draw_part, of_part, case) in zip(grid.flat, panels, strict=False):
        draw_part(axes, of_part, case)
    figure.suptitle(f"{path.stem}: gloo processes, torch {rows[0]['torch']}", fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(path: Path) -> None:
    with path.open(newline="") as file:
        draw(list(csv.DictReader(file)), path.with_suffix(".png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
