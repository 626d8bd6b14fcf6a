"""The picture of a results file: every op's rate against the copy of the same run.

``python -m benchmarks.roofline benchmarks/results/<machine>.csv`` draws it again, beside the file.
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


def largest_cases(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each op's largest size, one list per case: ours first, the copy last."""
    largest = {}
    for row in rows:
        largest[row["op"]] = max(largest.get(row["op"], 0), int(row["numel"]))
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if int(row["numel"]) == largest[row["op"]]:
            cases.setdefault((row["op"], row["case"]), []).append(row)
    return [cases[key] for key in sorted(cases)]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture: a line per case, with our rate, the peers' and the copy's."""
    cases = largest_cases(rows)
    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.26 * len(cases)), layout="constrained")
    for height, (ours, *peers, copy) in enumerate(reversed(cases)):
        rates = [float(row["of_copy"]) for row in peers]
        best = max(rates, default=float("nan"))
        label = {"label": "pyparallel"}, {"label": "best peer"}, {"label": "other peers"}
        ours_kind, best_kind, other_kind = label if height == 0 else ({}, {}, {})
        others = [rate for rate in rates if rate != best]
        axes.plot(others, [height] * len(others), "|", color="0.6", ms=8, **other_kind)
        axes.plot(best, height, "o", mfc="white", mec="tab:orange", ms=6, **best_kind)
        axes.plot(float(ours["of_copy"]), height, "o", color="tab:blue", ms=6, **ours_kind)
        text = f" {float(ours['gb_per_s']):,.0f} of {float(copy['gb_per_s']):,.0f} GB/s"
        axes.annotate(text, (1.01, height), xycoords=("axes fraction", "data"), va="center",
                      fontsize=7)  # fmt: skip
    axes.axvline(1, color="black", lw=1)
    axes.set_yticks(range(len(cases)))
    names = [f"{ours['op']}: {ours['case']}" for ours, *_ in reversed(cases)]
    axes.set_yticklabels(names, fontsize=7)
    axes.set_ylim(-0.7, len(cases) - 0.3)
    axes.set_xscale("log")
    ticks = [0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2]
    low = min(axes.get_xlim()[0], 0.5)
    axes.set_xticks([tick for tick in ticks if tick >= low])
    axes.get_xaxis().set_major_formatter(mpl.ticker.FormatStrFormatter("%g"))
    axes.get_xaxis().set_minor_formatter(mpl.ticker.NullFormatter())
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.set_xlabel("useful bytes per second, as a fraction of the same run's copy (black line)")
    copies = statistics.median(float(copy["gb_per_s"]) for *_, copy in cases)
    axes.set_title(f"{path.stem}, torch {rows[-1]['torch']}: largest size of each op; "
                   f"the copy moves {copies:,.0f} GB/s", fontsize=9)  # fmt: skip
    axes.legend(loc="upper left", fontsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(path: Path) -> None:
    with path.open(newline="") as file:
        draw(list(csv.DictReader(file)), path.with_suffix(".png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
