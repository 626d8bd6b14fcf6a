"""The tables of the rows that ``benchmarks.interlocking.compare`` collects."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from benchmarks.harness.rows import Row
from benchmarks.harness.tables import Measure, grouped, markdown_table, values, where
from benchmarks.interlocking.tasks import NUM_STAGES, TRIALS
from benchmarks.pipeline.table import ACCURACY, HELD_OUT, TRAINING, measure_of, select
from benchmarks.pipeline.tasks import Task

ORDER = list(TRIALS[0].contestants())
LOCAL, END_TO_END = ORDER[0], str(NUM_STAGES)
WORDS = {"mean": ", mean of its losses", "deep": ", deeper heads"}
PLACES = {LOCAL: " (local)", END_TO_END: " (end to end)"}
WINDOWS = [str(window + 1) for window in range(NUM_STAGES)]


def title(name: str) -> str:
    window, _, variant = name.partition(" ")
    return f"window {window}{PLACES.get(window, '')}{WORDS.get(variant, '')}"


def series(names: Iterable[str]) -> list[list[str]]:
    """Return series of windows with the same rule and heads, for comparison.

    Window 1 has only one loss, so it fits any rule; end to end uses no heads, so it fits any head.
    """
    names = list(names)
    plain = [name for name in names if " " not in name]
    found = [plain]
    for variant in WORDS:
        own = [name for name in names if name.endswith(f" {variant}")]
        local = [] if variant == "deep" else [name for name in plain if name == LOCAL]
        found += [[*local, *own, *(name for name in plain if name == END_TO_END)]] if own else []
    return found


BITS = replace(HELD_OUT, unit="")


@dataclass(frozen=True)
class Order:
    """The comparison of two windows."""

    gap: float  # mean of the larger window minus that of the smaller, in the unit of the measure
    spread: float  # sum of the two standard deviations

    @property
    def is_claimed(self) -> bool:
        return abs(self.gap) > self.spread


def judged_by(rows: Sequence[Row]) -> Measure:
    measure = measure_of(rows)
    return BITS if measure is HELD_OUT else measure


def order_of(smaller: Sequence[Row], larger: Sequence[Row], measure: Measure) -> Order | None:
    """Compare two windows; None if one of them has too few runs for a spread."""
    pair = [values(rows, measure) for rows in (smaller, larger)]
    if min(map(len, pair)) < 2:
        return None
    before, after = (statistics.fmean(found) for found in pair)
    of_measure = [measure.difference(value, 0) for found in pair for value in found]
    split = len(pair[0])
    spread = statistics.stdev(of_measure[:split]) + statistics.stdev(of_measure[split:])
    return Order(measure.difference(after, before), spread)


def markdown(rows: Sequence[Row]) -> str:
    parts = []
    for task in [trial.task for trial in TRIALS]:
        own = where(rows, task=task.name)
        if own:
            groups = chosen(own, task)
            parts += [_windows(groups, task), _orders(groups, judged_by(own)), _rates(own, task)]
    return "\n".join(part for part in parts if part)


def chosen(rows: Sequence[Row], task: Task) -> dict[str, list[Row]]:
    """Return the rows that are compared: at the main rate, or of each window at its own best."""
    if task.sweep_seed is not None:
        return select(rows, task, task.main_rate, ORDER)
    measure = judged_by(rows)

    def score(of_rate: list[Row]) -> float:
        found = statistics.fmean(values(of_rate, measure) or [math.inf])
        return -found if measure is ACCURACY else found

    def best(own: Sequence[Row]) -> list[Row]:
        """Return the rows of the best rate, by the seeds that all rates have."""
        by_rate = grouped(own, "rate")
        seeds = set.intersection(*({row["seed"] for row in each} for each in by_rate.values()))
        shared = {k: [r for r in each if r["seed"] in seeds] for k, each in by_rate.items()}
        return by_rate[min(shared, key=lambda rate: score(shared[rate]))]

    windows = grouped(where(rows, task=task.name), "schedule", ORDER)
    return {name: best(own) for name, own in windows.items()}


def _windows(groups: Mapping[str, list[Row]], task: Task) -> str:
    all_rows = [row for rows in groups.values() for row in rows]
    measures = [measure_of(all_rows), TRAINING]
    updates = " or ".join(sorted({row["updates"] for row in all_rows}))
    own_rates = task.sweep_seed is None
    rate = "each at its own best lr" if own_rates else f"lr {task.main_rate:g}"
    head = [f"{task.name}, {task.unit}, {rate}, {updates} updates"]
    head += [*(each.title for each in measures), "seeds", *(["lr"] if own_rates else [])]
    lines = []
    for name, rows in groups.items():
        cells = [_cell(values(rows, each), each) for each in measures]
        own_rate = [rows[0]["rate"]] if own_rates else []
        lines.append([title(name), *cells, len(rows), *own_rate])
    return markdown_table(head, lines)


def _cell(found: Sequence[float], measure: Measure) -> str:
    several = len(found) > 1
    numbers = (statistics.fmean(found), statistics.stdev(found)) if several else found
    return " ± ".join(map(measure.show.format, numbers))


def _orders(groups: Mapping[str, list[Row]], measure: Measure) -> str:
    """Return a table of the pairs of windows whose order is claimed; empty if none is."""
    lines = []
    pairs = [pair for each in series(groups) for pair in combinations(each, 2)]
    for smaller, larger in dict.fromkeys(pairs):
        order = order_of(groups[smaller], groups[larger], measure)
        if order is not None and order.is_claimed:
            rises = (order.gap > 0) == (measure is ACCURACY)
            better, worse = (larger, smaller) if rises else (smaller, larger)
            apart = (
                f"{each:.3g} {measure.unit}".strip() for each in (abs(order.gap), order.spread)
            )
            lines.append([title(better), title(worse), *apart])
    head = ["better", "than", f"by, {measure.title}", "sum of their standard deviations"]
    return markdown_table(head, lines) if lines else ""


def _rates(rows: Sequence[Row], task: Task) -> str:
    """Return the table of the windows at all rates, with one seed; empty if none ran at several."""
    if task.sweep_seed is None:  # the windows' own rates are in their table
        return ""
    own = where(rows, seed=str(task.sweep_seed))
    tried = {rate: select(own, task, rate, ORDER) for rate in task.rates}
    lines = []
    for name in WINDOWS:
        found = [values(groups.get(name, []), HELD_OUT) for groups in tried.values()]
        if sum(map(len, found)) > 1:
            lines.append([title(name), *(" ".join(map(HELD_OUT.show.format, x)) for x in found)])
    head = [f"{task.name}, seed {task.sweep_seed}: {HELD_OUT.title}, {task.unit}"]
    head += [f"lr {rate:g}" for rate in tried]
    return markdown_table(head, lines) if lines else ""
