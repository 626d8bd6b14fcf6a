"""The tables of compare.py's rows."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness import tables
from benchmarks.harness.rows import Row
from benchmarks.harness.tables import Measure, grouped, markdown_table, mean, numbers, where

BASELINE = "DDP"
COSTS = ("sent_numbers", "received_numbers", "computed_share")  # of a rank and update
TASKS = {"digits": "digits", "bytes": "text"}  # their names among the measures
ORDER = ["DDP", "DDP, bf16 hook", "LocalSGD", "SubnetTrainer", "SubnetTrainer, averaged"]
ORDER += ["SubnetTrainer, 2 copies", "SubnetTrainer, 4 copies"]


@dataclass(frozen=True)
class Curve:
    """A run from start to end, in seconds, steps and bytes per rank."""

    seconds: list[float]
    steps: list[float]
    sent: list[float]
    scores: list[float]

    @property
    def megabytes(self) -> list[float]:
        return [sent / 1e6 for sent in self.sent]


def read_curve(row: Row) -> Curve:
    fields = ("at_seconds", "at_steps", "at_sent_bytes_of_rank", "at_score")
    return Curve(*(numbers(row[field]) for field in fields))


def by_method(rows: Sequence[Row], task: str) -> dict[str, list[Row]]:
    return grouped(where(rows, task=task), "method", ORDER)


def measure_of(task: str) -> Measure:
    return tables.measure_of(TASKS[task])


def markdown(rows: Sequence[Row]) -> str:
    parts = [(by_method(rows, task), measure_of(task)) for task in TASKS]
    return "\n".join(_table(groups, measure) for groups, measure in parts if groups)


def _table(groups: dict[str, list[Row]], measure: Measure) -> str:
    ends = {row["seed"]: float(row["score"]) for row in groups.get(BASELINE, [])}
    head = [measure.title, "mean of seeds", "least to greatest", "steps", "MB sent by a rank"]
    head += ["seconds to target", "MB to target", "MB held by a rank", "seeds"]
    lines = []
    for name, rows in groups.items():
        scores = [float(row["score"]) for row in rows]
        runs = [(read_curve(row), ends[row["seed"]]) for row in rows if row["seed"] in ends]
        average, *ends_of = map(
            measure.show.format, (statistics.fmean(scores), min(scores), max(scores))
        )
        sent, held = (mean(rows, f"{x}_bytes_of_rank") / 1e6 for x in ("sent", "held"))
        numbers = [f"{mean(rows, 'steps'):,.0f}", f"{sent:,.0f}"]
        numbers += [*mean_time_to_target(runs, measure), f"{held:.1f}", len(rows)]
        lines.append([name, average, " to ".join(ends_of), *numbers])
    return markdown_table(head, lines)


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, one a seed, of the step size with the lowest mean loss."""
    groups = grouped(rows, "step_size")
    return min(groups.values(), key=lambda group: mean(group, "loss"))


def gradients(rows: Sequence[Row]) -> str:
    """Return the table of subnetworks and compressed gradients on digits, of compare_gradients."""
    head = ["ranks", "", "step size", "test accuracy, mean of seeds", "test loss"]
    head += ["numbers sent", "received", "computed"]
    lines = []
    for ranks, of_ranks in grouped(where(rows, task="network"), "ranks").items():
        for method, group in grouped(of_ranks, "method").items():
            best = best_rows(group)
            costs = [f"{float(best[0][name]):,.0f}" for name in COSTS[:2]]
            lines.append([
                ranks, method, best[0]["step_size"], f"{100 * mean(best, 'accuracy'):.1f} %",
                f"{mean(best, 'loss'):.3f}", *costs, f"{float(best[0][COSTS[2]]):.0%}",
            ])  # fmt: skip
    return markdown_table(head, lines)


def quadratics(rows: Sequence[Row]) -> str:
    """Return the table of subnetworks and compressed gradients on quadratics."""
    head = ["ranks", "problem", "subnetworks' limit", "subnetworks"]
    head += ["compressed gradients", "EF21", "numbers received"]
    lines = []
    for ranks, of_ranks in grouped(where(rows, task="quadratic"), "ranks").items():
        for seed, own in grouped(of_ranks, "seed").items():
            groups = grouped(own, "method")
            away = {
                method: " ".join(row["average_to_solution"] for row in group)
                for method, group in groups.items()
            }
            limit = groups["subnetworks"][0]["limit_to_solution"]
            received = ", ".join(group[0]["received_numbers"] for group in groups.values())
            lines.append([ranks, seed, limit, *away.values(), received])
    return markdown_table(head, lines)


def by_updates(rows: Sequence[Row]) -> str:
    """Return the table of subnets with copies after as many updates as DDP, of compare.py."""
    groups = by_method(rows, "bytes")
    updates = [int(each) for each in groups[BASELINE][0]["at_steps"].split()[-1:]]
    head = ["", "bits per byte, mean of seeds", "least to greatest", "seeds"]
    lines = []
    for name, own in groups.items():
        scores = [float(row["score"]) for row in own]
        ends = f"{min(scores):.3f} to {max(scores):.3f}"
        lines.append([name, f"{statistics.fmean(scores):.3f}", ends, len(own)])
    return f"After {updates[0]:,} updates:\n\n{markdown_table(head, lines)}"


def mean_time_to_target(runs: Sequence[tuple[Curve, float]], measure: Measure) -> tuple[str, str]:
    """Return mean seconds and MB to the first evaluation within the limit, if all runs reach it."""
    first = [time_to_target(curve, end, measure) for curve, end in runs]
    reached = [moment for moment in first if moment]
    if not reached or len(reached) < len(first):
        return (f"{len(reached)} of {len(first)} runs", "") if first else ("", "")
    seconds, sent = (statistics.fmean(values) for values in zip(*reached, strict=True))
    return f"{seconds:.1f}", f"{sent / 1e6:,.1f}"


def time_to_target(curve: Curve, end: float, measure: Measure) -> tuple[float, float] | None:
    """Return seconds and bytes of the first evaluation within the limit, or None."""
    sign = 1 if measure.unit == "points" else -1  # accuracy rises, bits fall
    for seconds, sent, score in zip(curve.seconds, curve.sent, curve.scores, strict=True):
        if sign * measure.difference(score, end) >= -measure.limit:
            return seconds, sent
    return None
