"""The tables of the rows of ``benchmarks.gossip.compare``."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.harness.options import shorten
from benchmarks.harness.rows import Row

BASELINE = "allreduce"


@dataclass(frozen=True)
class Measure:
    """How scores on one dataset are compared and printed."""

    data: str
    title: str
    show: Callable[[float], str]
    difference: Callable[[float, float], float]
    unit: str
    limit: float


MEASURES = [
    Measure(
        data="digits",
        title="digits, test accuracy",
        show=lambda score: f"{score:.2%}",
        difference=lambda score, exact: 100 * (score - exact),
        unit="points",
        limit=1,
    ),
    Measure(
        data="text",
        title="text, held-out bits per byte",
        show=lambda score: f"{score:.3f}",
        difference=lambda score, exact: 100 * (score / exact - 1),
        unit="%",
        limit=2,
    ),
]


def by_algorithm(rows: Sequence[Row], data: str) -> dict[str, list[Row]]:
    """Return the rows of each algorithm on one dataset, the baseline first."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["data"] == data:
            groups.setdefault(row["algorithm"], []).append(row)
    return dict(sorted(groups.items(), key=lambda item: (item[0] != BASELINE, item[0])))


def differences(rows: Sequence[Row], baseline: Sequence[Row], measure: Measure) -> list[float]:
    """Return the difference to the baseline for each seed with equal numbers of steps and ranks."""
    exact = {(r["seed"], r["steps"], r["ranks"]): float(r["score"]) for r in baseline}
    keys = [(row, (row["seed"], row["steps"], row["ranks"])) for row in rows]
    return [measure.difference(float(row["score"]), exact[k]) for row, k in keys if k in exact]


def markdown(rows: Sequence[Row]) -> str:
    """Return a markdown table for each dataset."""
    parts = [_table(by_algorithm(rows, m.data), m) for m in MEASURES if by_algorithm(rows, m.data)]
    return "\n".join(parts)


def _table(groups: dict[str, list[Row]], measure: Measure) -> str:
    steps = " or ".join(sorted({row["steps"] for rows in groups.values() for row in rows}))
    lines = [
        f"| {measure.title}, {steps} steps | mean of seeds | against all-reduce, {measure.unit} "
        "| kB sent per step and rank | seeds |",
        "|---" * 5 + "|",
    ]
    for algorithm, rows in groups.items():
        found = differences(rows, groups.get(BASELINE, []), measure)
        cells = [
            f"{algorithm}: `{shorten(rows[0]['options'])}`",
            measure.show(statistics.fmean(float(row["score"]) for row in rows)),
            f"{statistics.fmean(found):+.2f}" if found and algorithm != BASELINE else "",
            f"{statistics.fmean(float(row['step_bytes']) for row in rows) / 1e3:,.0f}",
            str(len(rows)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])
