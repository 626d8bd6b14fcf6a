"""The picture of a results file: every op's rate against the copy of the same run.

``python -m benchmarks.harness.roofline benchmarks/results/<machine>.csv`` draws it beside the file.
"""

import csv
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

Row = dict[str, str]
TICKS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]


def largest_cases(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each op's largest size, one list per case: ours first, the copy last."""
    largest = {}
    for row in rows:
        largest[row["op"]] = max(largest.get(row["op"], 0), int(row["numel"]))
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if int(row["numel"]) == largest[row["op"]]:
            cases.setdefault((row["op"], row["case"]), []).append(row)
    return [cases[key] for key in sorted(cases)]


def mark(axes: plt.Axes, height: int, case: list[Row]) -> list[plt.Line2D]:
    """Draw the marks of one case at its height, with the two rates as numbers beside them."""
    ours, *peers, copy = case
    rates = [float(row["of_copy"]) for row in peers]
    best = max(rates, default=float("nan"))
    others = [rate for rate in rates if rate != best]
    text = f"{float(ours['gb_per_s']):,.0f} of {float(copy['gb_per_s']):,.0f} GB/s"
    place = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": 7}
    axes.annotate(text, (1.01, height), **place)
    return [
        *axes.plot(float(ours["of_copy"]), height, "o", color="tab:blue", ms=6, zorder=3),
        *axes.plot(best, height, "o", mfc="white", mec="tab:orange", ms=6),
        *axes.plot(others, [height] * len(others), "|", color="0.6", ms=8),
    ]


def label(axes: plt.Axes, cases: list[list[Row]]) -> None:
    """Set the scale of rates, the line of the copy, and the names of the cases."""
    axes.axvline(1, color="black", lw=1)
    axes.set_xlabel("useful bytes per second, as a fraction of the same run's copy (black line)")
    axes.set_xscale("log")
    ticks = [tick for tick in TICKS if tick >= min(axes.get_xlim()[0], 0.5)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_formatter(mpl.ticker.NullFormatter())
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    names = [f"{ours['op']}: {ours['case']}" for ours, *_ in cases]
    axes.set_yticks(range(len(cases)), names, fontsize=7)
    axes.set_ylim(-0.7, len(cases) - 0.3)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the picture: a line per case, with our rate, the peers' and the copy's."""
    cases = largest_cases([row for row in rows if row["of_copy"]])[::-1]
    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.26 * len(cases)), layout="constrained")
    marks = [mark(axes, height, case) for height, case in enumerate(cases)]
    label(axes, cases)
    copy = statistics.median(float(case[-1]["gb_per_s"]) for case in cases)
    title = f"{path.stem}, torch {rows[-1]['torch']}, largest size of each op; "
    axes.set_title(f"{title}the copy moves {copy:,.0f} GB/s", fontsize=9)
    names = ["pyparallel", "its best peer", "other peers"]
    place = {"loc": "outside lower center", "ncols": 3, "frameon": False}
    figure.legend(marks[0], names, fontsize=7, **place)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(path: Path) -> None:
    with path.open(newline="") as file:
        draw(list(csv.DictReader(file)), path.with_suffix(".png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
