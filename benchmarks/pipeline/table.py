"""The tables of the rows that ``benchmarks.pipeline.compare`` collects."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.harness.options import shorten
from benchmarks.harness.rows import Row
from benchmarks.pipeline.tasks import TASKS, Task

BASELINE = "gpipe"
ORDER = [BASELINE, "pipedream", "2bw", "spectrain", "xpipe", "pipeoptim", "naive"]


@dataclass(frozen=True)
class Measure:
    """A metric of each row, and how it is compared and printed."""

    field: str
    title: str
    show: Callable[[float], str]
    difference: Callable[[float, float], float]
    unit: str
    limit: float


def percent(value: float, exact: float) -> float:
    return 100 * (value / exact - 1)


def points(value: float, exact: float) -> float:
    return 100 * (value - exact)


TRAINING = Measure("training_loss", "training loss", "{:.4f}".format, percent, "%", 1)
HELD_OUT = Measure("held_out_loss", "held-out loss", "{:.4f}".format, percent, "%", 1)
ACCURACY = Measure("held_out_accuracy", "held-out accuracy", "{:.2%}".format, points, "points", 1)


def measure_of(rows: Iterable[Row]) -> Measure:
    """Return the main metric of a task: accuracy if it has one."""
    return ACCURACY if any(row[ACCURACY.field] for row in rows) else HELD_OUT


def select(
    rows: Sequence[Row], task: Task, rate: float, order: Sequence[str] = ORDER
) -> dict[str, list[Row]]:
    """Return the rows of each schedule at one learning rate, the baseline first."""
    groups: dict[str, list[Row]] = {name: [] for name in order}
    for row in rows:
        if row["task"] == task.name and float(row["rate"]) == rate:
            groups[row["schedule"]].append(row)
    return {name: group for name, group in groups.items() if group}


def values(rows: Iterable[Row], measure: Measure) -> list[float]:
    """Return the values of the runs that did not diverge."""
    found = [float(row[measure.field] or "inf") for row in rows]
    return [value for value in found if math.isfinite(value)]


def differences(rows: Iterable[Row], baseline: Iterable[Row], measure: Measure) -> list[float]:
    """Return the differences by seed, for seeds with equally many updates in both."""
    exact = {(row["seed"], row["updates"]): row for row in baseline}
    pairs = [(row, exact.get((row["seed"], row["updates"]))) for row in rows]
    both = [(values([a], measure), values([b], measure)) for a, b in pairs if b is not None]
    return [measure.difference(*a, *b) for a, b in both if a and b]


def markdown(rows: Sequence[Row]) -> str:
    """Return two tables per task: all schedules at the main rate, and some at all rates."""
    parts = []
    for task in TASKS:
        own = [row for row in rows if row["task"] == task.name]
        if own:
            parts += [_main_table(own, task), _sweep_table(own, task)]
    return "\n".join(part for part in parts if part)


def _main_table(rows: Sequence[Row], task: Task) -> str:
    groups = select(rows, task, task.main_rate)
    measures = [measure_of(rows), TRAINING]
    titles = " | ".join(f"{each.title} (against GPipe)" for each in measures)
    updates = " or ".join(sorted({row["updates"] for group in groups.values() for row in group}))
    lines = [
        f"| {task.name}, lr {task.main_rate:g}, {updates} updates | {titles} "
        "| weight copies by stage | seeds |",
        "|---" * (len(measures) + 3) + "|",
    ]
    for name, group in groups.items():
        cells = [
            f"{name}: `{shorten(group[0]['options'])}`",
            *(_cell(group, groups.get(BASELINE, []), each) for each in measures),
            group[0]["weight_copies"],
            str(len(group)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _sweep_table(rows: Sequence[Row], task: Task) -> str:
    """Return the table of all rates; empty if there is only one."""
    if len(task.rates) == 1:
        return ""
    at_rates = {rate: select(rows, task, rate) for rate in task.rates}
    measure = measure_of(rows)
    titles = " | ".join(f"lr {rate:g}" for rate in at_rates)
    lines = [
        f"| {task.name}, {measure.title} (against GPipe) | {titles} |",
        "|---" * (len(at_rates) + 1) + "|",
    ]
    swept = [name for name in ORDER if sum(name in groups for groups in at_rates.values()) > 1]
    for name in swept:
        cells = [
            _cell(groups.get(name, []), groups.get(BASELINE, []), measure)
            for groups in at_rates.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cell(rows: Sequence[Row], baseline: Sequence[Row], measure: Measure) -> str:
    """Return the mean over seeds, its difference from the baseline, and the diverged runs."""
    found = values(rows, measure)
    of_pairs = differences(rows, baseline, measure)
    parts = [measure.show(statistics.fmean(found))] if found else []
    if of_pairs and rows[0]["schedule"] != BASELINE:
        parts.append(f"({statistics.fmean(of_pairs):+.1f} {measure.unit})")
    if len(found) < len(rows):
        parts.append(f"{len(rows) - len(found)} of {len(rows)} diverged")
    return " ".join(parts)
