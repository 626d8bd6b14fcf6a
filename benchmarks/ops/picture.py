"""Pictures of the ops: every rate against the copy of the same run."""

from collections.abc import Sequence
from functools import partial

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import pictures
from benchmarks.harness.pictures import BLACK, BLUE, GRAY, RED, panels
from benchmarks.harness.rows import Row
from benchmarks.ops.table import best_peer, largest_cases

COMPRESSION = (
    "orthogonalize",
    "dequantize_statistical",
    "pack_signs",
    "quantize",
    "quantize_difference",
    "quantize_statistical",
    "random_k",
    "scatter_add",
    "scatter_chunks",
    "top_k",
    "top_k_chunks",
)
TICKS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]


def mark(axes: Axes, place: int, case: list[Row]) -> None:
    """Draw the marks of one case, with its speed against the best peer beside them."""
    ours, *peers, _ = case
    best = best_peer(case)
    rates = [float(row["of_copy"]) for row in peers if row is not best]
    axes.plot(rates, [place] * len(rates), "|", color=GRAY, ms=9, mew=1.5)
    if best is not None:
        axes.plot(float(best["of_copy"]), place, "o", mfc="white", mec=RED, mew=1.5, ms=7)
        text = f"{float(best['speedup_of_ours']):.3g}x"
        axes.annotate(text, (1.01, place), xycoords=("axes fraction", "data"), va="center")
    axes.plot(float(ours["of_copy"]), place, "o", color=BLUE, ms=7)


def draw(rows: Sequence[Row], title: str, *, compresses: bool) -> Figure | None:
    rows = [row for row in rows if row.get("of_copy")]
    cases = [case for case in largest_cases(rows) if (case[0]["op"] in COMPRESSION) == compresses]
    if not cases:
        return None
    figure, (axes,) = panels(title, 1, 1.7 + 0.27 * len(cases))
    for place, case in enumerate(cases):
        mark(axes, place, case)
    axes.axvline(1, color=BLACK, lw=1)
    axes.set_xscale("log")
    ticks = [tick for tick in TICKS if tick >= min(axes.get_xlim()[0], 0.5)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_formatter(mpl.ticker.NullFormatter())
    axes.grid(axis="x")
    names = [f"{case[0]['op']}: {case[0]['case']}" for case in cases]
    axes.set_yticks(range(len(cases)), names, fontsize=9)
    axes.set_ylim(len(cases) - 0.4, -0.6)
    figure.supxlabel(
        "rate, 1 is a copy. Blue: pyparallel; red: its best peer; gray: other peers.\n"
        "At the right: speed relative to the best peer's."
    )
    return figure


PICTURES = {
    "mixing": partial(
        draw, title="How near to a copy are averaging, prediction and steps?", compresses=False
    ),
    "compressing": partial(
        draw, title="How near to a copy are the compressors' kernels?", compresses=True
    ),
}

if __name__ == "__main__":
    pictures.main(PICTURES)
