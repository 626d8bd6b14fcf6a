"""The table and the picture of the rows that compare.py collects."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from benchmarks.compression.tasks import IN_SMALL_BLOCKS, WARMED
from benchmarks.gossip.table import MEASURES, Measure, differences
from benchmarks.harness.rows import Row
from pyparallel.recommend import CANDIDATES, DENSE

mpl.use("Agg")
from matplotlib import pyplot as plt

ORDER = {
    candidate.name: place for place, candidate in enumerate(CANDIDATES + IN_SMALL_BLOCKS + WARMED)
}


def by_compressor(rows: Sequence[Row], task: str) -> dict[str, list[Row]]:
    """Return the rows of each compressor on one task, in the order of the candidates."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: ORDER.get(row["compressor"], len(ORDER))):
        if row["task"] == task:
            groups.setdefault(row["compressor"], []).append(row)
    return groups


def mean(rows: Sequence[Row], field: str) -> float:
    return statistics.fmean(float(row[field]) for row in rows)


def verdict(found: Sequence[float], measure: Measure) -> str:
    """Return whether the mean over seeds meets the goal; better scores always do."""
    if not found:
        return ""
    worse = -statistics.fmean(found) if measure.unit == "points" else statistics.fmean(found)
    return "yes" if worse <= measure.limit else "**no**"


def markdown(rows: Sequence[Row]) -> str:
    """Return a table for each task."""
    parts = [(by_compressor(rows, measure.data), measure) for measure in MEASURES]
    return "\n".join(_table(groups, measure) for groups, measure in parts if groups)


def _table(groups: dict[str, list[Row]], measure: Measure) -> str:
    lines = [
        f"| {measure.title} | mean of seeds | least to greatest | against {DENSE.name} "
        f"| within {measure.limit:g} {measure.unit} | kB of messages per step and rank "
        "| share of fp32 | sent, share of fp32 | residual at the end | steps | seeds |",
        "|---" * 11 + "|",
    ]
    for name, rows in groups.items():
        scores = [float(row["score"]) for row in rows]
        found = differences(rows, groups.get(DENSE.name, []), measure)
        cells = [
            f"{name}: `{rows[0]['options']}`",
            measure.show(statistics.fmean(scores)),
            f"{measure.show(min(scores))} to {measure.show(max(scores))}",
            f"{statistics.fmean(found):+.2f} {measure.unit}" if found else "",
            verdict(found, measure),
            f"{mean(rows, 'payload_bytes') / 1e3:,.1f}",
            f"{mean(rows, 'payload_share'):.1%}",
            f"{mean(rows, 'wire_share'):.1%}",
            f"{mean(rows, 'residual_norm'):.2g}",
            " ".join(sorted({row["steps"] for row in rows})),
            " ".join(sorted(row["seed"] for row in rows)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw, for each task, every compressor's difference from dense, with its message size."""
    measures = [measure for measure in MEASURES if by_compressor(rows, measure.data)]
    if not measures:
        return
    lines = max(len(by_compressor(rows, measure.data)) for measure in measures)
    figure, panels = plt.subplots(
        1,
        len(measures),
        figsize=(6 * len(measures), 1.5 + 0.32 * lines),
        layout="constrained",
        squeeze=False,
    )
    for axes, measure in zip(panels[0], measures, strict=True):
        draw_differences(axes, by_compressor(rows, measure.data), measure)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_differences(axes: plt.Axes, groups: dict[str, list[Row]], measure: Measure) -> None:
    """Draw a dot for each seed, and one for their mean."""
    names = [name for name in groups if name != DENSE.name][::-1]
    of_names = {
        name: differences(groups[name], groups.get(DENSE.name, []), measure) for name in names
    }
    reach = 5 * measure.limit  # an outlier must not squeeze the others
    axes.axvspan(-measure.limit, measure.limit, color="0.93")
    axes.axvline(0, color="black", linewidth=1)
    for height, found in enumerate(of_names.values()):
        axes.plot(found, [height] * len(found), "o", mfc="white", mec="C0", ms=6)
        average = statistics.fmean(found) if found else 0
        if not abs(average) <= reach:  # nan is not, either
            axes.plot(math.copysign(0.97 * reach, average), height, "x", color="C3", ms=8)
        elif found:
            axes.plot(average, height, "o", color="C0", ms=8)
    labels = [f"{name}, {mean(groups[name], 'payload_share'):.1%}" for name in names]
    axes.set_yticks(range(len(names)), labels, fontsize=8)
    axes.set_xlim(-reach, reach)
    axes.set(
        title=f"{measure.title}, against {DENSE.name}",
        xlabel=f"{measure.unit}; hollow: one seed; cross: off the scale\n"
        "beside the names: messages, of fp32's bytes",
    )
    axes.grid(axis="x", alpha=0.3)
