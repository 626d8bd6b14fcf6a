"""The tables of the rows that compare.py collects."""

import statistics
from collections.abc import Sequence

from benchmarks.compression.training import IN_SMALL_BLOCKS, WARMED
from benchmarks.harness.options import shorten
from benchmarks.harness.rows import Row
from benchmarks.harness.tables import (
    MEASURES,
    Measure,
    differences,
    grouped,
    markdown_table,
    mean,
    where,
)
from pyparallel.planning.recommend import CANDIDATES, DENSE

ORDER = [candidate.name for candidate in CANDIDATES + IN_SMALL_BLOCKS + WARMED]


def by_compressor(rows: Sequence[Row], task: str) -> dict[str, list[Row]]:
    return grouped(where(rows, task=task), "compressor", ORDER)


def verdict(found: Sequence[float], measure: Measure) -> str:
    """Return whether the mean over seeds meets the goal; better scores always do."""
    if not found:
        return ""
    worse = -statistics.fmean(found) if measure.unit == "points" else statistics.fmean(found)
    return "yes" if worse <= measure.limit else "**no**"


def markdown(rows: Sequence[Row]) -> str:
    parts = [(by_compressor(rows, measure.data), measure) for measure in MEASURES]
    return "\n".join(_table(groups, measure) for groups, measure in parts if groups)


def _table(groups: dict[str, list[Row]], measure: Measure) -> str:
    steps = " or ".join(sorted({row["steps"] for rows in groups.values() for row in rows}))
    head = [
        f"{measure.title}, {steps} steps",
        "mean of seeds",
        f"against {DENSE.name}, {measure.unit}",
        f"within {measure.limit:g} {measure.unit}",
        "messages, of fp32's bytes",
        "seeds",
    ]
    lines = []
    for name, rows in groups.items():
        found = differences(rows, groups.get(DENSE.name, []), measure)
        lines.append([
            f"{name}: `{shorten(rows[0]['options'])}`",
            measure.show.format(mean(rows, "score")),
            f"{statistics.fmean(found):+.2f}" if found else "",
            verdict(found, measure),
            f"{mean(rows, 'payload_share'):.1%}",
            len(rows),
        ])  # fmt: skip
    return markdown_table(head, lines)
