"""The table and the picture of compare.py's rows."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np

from benchmarks.gossip.table import MEASURES, Measure
from benchmarks.harness.rows import Row

mpl.use("Agg")
from matplotlib import pyplot as plt

BASELINE = "DDP"
TASKS = {"digits": "digits", "bytes": "text"}  # their names among the measures
SHOWN = {"digits": (0.9, 1.0)}  # range of scores; below it all rise alike
COLORS = {
    "DDP": "black",
    "DDP, bf16 hook": "0.6",
    "LocalSGD": "C1",
    "SubnetTrainer": "C0",
    "SubnetTrainer, averaged": "C2",
}


@dataclass(frozen=True)
class Curve:
    """A run from start to end, in seconds, steps and bytes per rank."""

    seconds: list[float]
    steps: list[float]
    sent: list[float]
    scores: list[float]

    @property
    def megabytes(self) -> list[float]:
        """Megabytes sent."""
        return [sent / 1e6 for sent in self.sent]


def read_curve(row: Row) -> Curve:
    fields = ("at_seconds", "at_steps", "at_sent_bytes_of_rank", "at_score")
    return Curve(*([float(number) for number in row[field].split()] for field in fields))


def by_method(rows: Sequence[Row], task: str) -> dict[str, list[Row]]:
    """Return the rows of each method on one task, in the order of the picture's legend."""
    groups: dict[str, list[Row]] = {name: [] for name in COLORS}
    for row in rows:
        if row["task"] == task:
            groups.setdefault(row["method"], []).append(row)
    return {name: group for name, group in groups.items() if group}


def measure_of(task: str) -> Measure:
    return next(measure for measure in MEASURES if measure.data == TASKS[task])


def markdown(rows: Sequence[Row]) -> str:
    """Return a table for each task."""
    parts = [(by_method(rows, task), measure_of(task)) for task in TASKS]
    return "\n".join(_table(groups, measure) for groups, measure in parts if groups)


def _table(groups: dict[str, list[Row]], measure: Measure) -> str:
    goal = f"{BASELINE}'s final score within {measure.limit:g} {measure.unit}"
    lines = [
        f"| {measure.title} | mean of seeds | least to greatest | against {BASELINE} | steps "
        f"| MB sent per rank | MB sent in total | of {BASELINE}'s | {goal}: seconds | MB per rank "
        "| weights and state held, MB per rank | seconds | seeds |",
        "|---" * 13 + "|",
    ]
    baseline = groups.get(BASELINE, [])
    for name, rows in groups.items():
        scores = [float(row["score"]) for row in rows]
        ends = {row["seed"]: float(row["score"]) for row in baseline}
        pairs = [(row, ends[row["seed"]]) for row in rows if row["seed"] in ends]
        found = [measure.difference(float(row["score"]), end) for row, end in pairs]
        sent = mean(rows, "sent_bytes_of_rank")
        share = sent / mean(baseline, "sent_bytes_of_rank") if baseline else 0
        cells = [
            f"{name}: `{rows[0]['options']}`",
            measure.show(statistics.fmean(scores)),
            f"{measure.show(min(scores))} to {measure.show(max(scores))}",
            f"{statistics.fmean(found):+.2f} {measure.unit}" if found else "",
            f"{mean(rows, 'steps'):,.0f}",
            f"{sent / 1e6:,.1f}",
            f"{mean(rows, 'sent_bytes_of_all') / 1e6:,.1f}",
            f"{share:.1%}" if share else "",
            *mean_time_to_target([(read_curve(row), end) for row, end in pairs], measure),
            f"{mean(rows, 'held_bytes_of_rank') / 1e6:.2f}",
            f"{mean(rows, 'seconds'):.1f}",
            " ".join(sorted(row["seed"] for row in rows)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def mean(rows: Sequence[Row], field: str) -> float:
    return statistics.fmean(float(row[field]) for row in rows)


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


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the score over time and over bytes, for each task."""
    tasks = [task for task in TASKS if by_method(rows, task)]
    if not tasks:
        return
    figure, panels = plt.subplots(
        len(tasks), 2, figsize=(10, 0.5 + 3.6 * len(tasks)), layout="constrained", squeeze=False
    )
    for (left, right), task in zip(panels, tasks, strict=True):
        groups = by_method(rows, task)
        some = next(iter(groups.values()))[0]
        for name, group in groups.items():
            curves = [read_curve(row) for row in group]
            draw_mean(left, name, [(curve.seconds, curve.scores) for curve in curves])
            draw_mean(right, name, [(curve.megabytes, curve.scores) for curve in curves])
        left.set(xlabel="seconds of training", ylabel=f"{task}: {some['measure']}")
        right.set(xlabel="MB sent per rank", xscale="log")
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.set_ylim(SHOWN.get(task))
        right.set_xlim(1, None)  # before the first merge nothing is sent
        left.legend(fontsize=8, loc="lower right" if task in SHOWN else "upper right")
        seeds = max(map(len, groups.values()))
        shown = "one seed" if seeds == 1 else f"mean and range of {seeds} seeds"
        left.set_title(f"{some['ranks']} ranks, {some['link']} each, {shown}", fontsize=9)
        right.set_title("the same runs over bytes sent", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_mean(axes: plt.Axes, name: str, curves: Sequence[tuple[list[float], list[float]]]) -> None:
    """Draw the mean of the seeds, in a band from minimum to maximum."""
    places = sorted({place for xs, _ in curves for place in xs})
    last = min(xs[-1] for xs, _ in curves)
    places = [place for place in places if place <= last]
    values = np.array([np.interp(places, xs, ys) for xs, ys in curves])
    color = COLORS.get(name)
    axes.plot(places, values.mean(0), color=color, label=name, linewidth=1.6)
    axes.fill_between(places, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)
