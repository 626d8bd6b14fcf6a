"""The tables of the rows that ``benchmarks.pipeline.compare`` collects."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

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


OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon and AdamW"}  # of the column ``optimizer``
PLAIN = "none"  # of the column ``correction``


def searched(rows: Sequence[Row]) -> str:
    """Return for each number of stages the best rate of each contestant, and the loss at it."""
    parts = []
    for stages in dict.fromkeys(row["stages"] for row in rows):
        own = [row for row in rows if row["stages"] == stages and row["updates"] == SEARCHED]
        names = " | ".join(f"{name}: rate | bits per byte" for name in OPTIMIZERS.values())
        lines = [f"| {stages} stages, {SEARCHED} updates | {names} |", "|---" * 5 + "|"]
        for contestant in contestants(own):
            cells = []
            for optimizer in OPTIMIZERS:
                found = trained(own, contestant, optimizer)
                best = min(found, key=bits) if found else None
                cells += [best["rate"], f"{bits(best):.3f}"] if best else ["", ""]
            lines.append(f"| {label(contestant)} | {' | '.join(cells)} |")
        parts.append("\n".join([*lines, ""]))
    return "\n".join(parts)


SEARCHED = "500"  # updates


def finals(rows: Sequence[Row]) -> str:
    """Return the long runs at each one's own rate and at GPipe's, for each number of stages."""
    parts = []
    for stages in dict.fromkeys(row["stages"] for row in rows):
        own = [row for row in rows if row["stages"] == stages and row["updates"] != SEARCHED]
        if not own:
            continue
        updates, seeds = own[0]["updates"], len({row["seed"] for row in own})
        title = f"{stages} stages, {int(updates):,} updates, {seeds} seeds"
        lines = [
            f"| {title} | rate | bits per byte (least to greatest) | against GPipe with the same "
            "optimizer | against GPipe with AdamW |",
            "|---" * 5 + "|",
        ]
        first = min(long_runs(own, GPIPE, "adamw").values(), key=mean_bits)
        for optimizer, name in OPTIMIZERS.items():
            baseline = long_runs(own, GPIPE, optimizer)
            exact = min(baseline.values(), key=mean_bits) if baseline else []
            for contestant in contestants(own):
                for rate, group in long_runs(own, contestant, optimizer).items():
                    found = [bits(row) for row in group]
                    cells = [
                        f"{label(contestant)}, {name}",
                        rate,
                        f"{statistics.fmean(found):.3f} ({min(found):.3f} to {max(found):.3f})",
                        *(f"{behind(group, each):+.1f} %" for each in (exact, first)),
                    ]
                    lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join([*lines, ""]))
    return "\n".join(parts)


GPIPE = ("GPipe", PLAIN)


def contestants(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return schedules and corrections: first GPipe, then those without a correction."""
    found = dict.fromkeys((row["schedule"], row["correction"]) for row in rows)
    return sorted(found, key=lambda each: (each != GPIPE, each[1] != PLAIN, each))


def trained(rows: Sequence[Row], contestant: tuple[str, str], optimizer: str) -> list[Row]:
    """Return the rows of a contestant with an optimizer."""
    return [
        row
        for row in rows
        if (row["schedule"], row["correction"]) == contestant and row["optimizer"] == optimizer
    ]


def long_runs(
    rows: Sequence[Row], contestant: tuple[str, str], optimizer: str
) -> dict[str, list[Row]]:
    """Return the long runs of a contestant by rate, ascending."""
    own = [row for row in trained(rows, contestant, optimizer) if row["updates"] != SEARCHED]
    rates = sorted({row["rate"] for row in own}, key=float)
    return {rate: [row for row in own if row["rate"] == rate] for rate in rates}


def label(contestant: tuple[str, str]) -> str:
    """Return a contestant's name."""
    schedule, correction = contestant
    return schedule if correction == PLAIN else f"{schedule}, {correction}"


def bits(row: Row) -> float:
    """Return the held-out bits per byte of a row."""
    return float(row["held_out_bits"])


def mean_bits(rows: Sequence[Row]) -> float:
    """Return the mean held-out bits per byte."""
    return statistics.fmean(map(bits, rows))


def behind(rows: Sequence[Row], baseline: Sequence[Row]) -> float:
    """Return by how many percent the mean loss is above another one."""
    return percent(mean_bits(rows), mean_bits(baseline))


def race(rows: Sequence[Row]) -> str:
    """Return the end of each training on the clock, and the time to the worst end of all."""
    trainings: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        names = "system", "optimizer", "rate", "microbatches"
        trainings.setdefault(tuple(row[name] for name in names), []).append(row)
    updates = rows[-1]["updates"]
    worst = max(bits(row) for row in rows if row["updates"] == updates)
    lines = [
        "| | rate | microbatches an update | ms an update | bits at the end | seconds to "
        f"{worst:.3f} bits |",
        "|---" * 6 + "|",
    ]
    for (system, optimizer, *columns), own in trainings.items():
        ends = [row for row in own if row["updates"] == updates]
        seconds = statistics.fmean(float(row["seconds"]) for row in ends)
        times = [reached(own, row["seed"], worst) for row in ends]
        cells = [
            f"{system}, {OPTIMIZERS[optimizer]}",
            *columns,
            f"{1e3 * seconds / int(updates):.1f}",
            f"{mean_bits(ends):.3f}",
            f"{statistics.fmean(times):.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def reached(rows: Sequence[Row], seed: str, target: float) -> float:
    """Return the seconds to a loss, between evaluations linear; infinite if it is not reached."""
    curve = [(float(row["seconds"]), bits(row)) for row in rows if row["seed"] == seed]
    for (before, high), (after, low) in pairwise(curve):
        if low <= target:
            return before + (after - before) * (high - target) / (high - low)
    return math.inf
