"""The table and the picture of the rows that compare_interlocking.py collects."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import matplotlib as mpl

from benchmarks.interlocking_tasks import NUM_STAGES, TRIALS
from benchmarks.pipeline_table import (
    ACCURACY,
    HELD_OUT,
    TRAINING,
    Measure,
    draw_curves,
    measure_of,
    select,
    values,
)
from benchmarks.pipeline_tasks import Task
from benchmarks.rows import Row

mpl.use("Agg")
from matplotlib import pyplot as plt

ORDER = [str(window) for window in range(1, NUM_STAGES + 1)]
TITLES = {"1": "window 1 (local)", "2": "window 2", "3": "window 3", "4": "window 4 (end to end)"}
COLORS = dict(zip(TITLES.values(), ["#d55e00", "#e69f00", "#56b4e9", "black"], strict=True))


def difference(value: float, exact: float) -> float:
    return value - exact


BITS = replace(HELD_OUT, difference=difference, unit="")


@dataclass(frozen=True)
class Order:
    """What two windows show of each other.

    Args:
        gap: of the means, in the unit of the measure: of the larger window from the smaller.
        spread: the standard deviations of the two, added.
    """

    gap: float
    spread: float

    @property
    def is_claimed(self) -> bool:
        """Whether the gap exceeds the spread."""
        return abs(self.gap) > self.spread


def judged_by(rows: Sequence[Row]) -> Measure:
    """Accuracy where there is one, else the loss on what is held out."""
    measure = measure_of(rows)
    return BITS if measure is HELD_OUT else measure


def order_of(smaller: Sequence[Row], larger: Sequence[Row], measure: Measure) -> Order | None:
    """None: one of them has too few runs for a spread."""
    pair = [values(rows, measure) for rows in (smaller, larger)]
    if min(map(len, pair)) < 2:
        return None
    before, after = (statistics.fmean(found) for found in pair)
    of_measure = [measure.difference(value, 0) for found in pair for value in found]
    split = len(pair[0])
    spread = statistics.stdev(of_measure[:split]) + statistics.stdev(of_measure[split:])
    return Order(measure.difference(after, before), spread)


def markdown(rows: Sequence[Row]) -> str:
    """For each task all windows, their order, and the rates that end-to-end training was given."""
    parts = []
    for task in [trial.task for trial in TRIALS]:
        own = [row for row in rows if row["task"] == task.name]
        if own:
            groups = select(own, task, task.main_rate, ORDER)
            parts += [_windows(groups, task), _orders(groups, judged_by(own)), _rates(own, task)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _windows(groups: Mapping[str, list[Row]], task: Task) -> str:
    all_rows = [row for rows in groups.values() for row in rows]
    measures = [each for each in (ACCURACY, HELD_OUT, TRAINING) if values(all_rows, each)]
    titles = " | ".join(f"{each.title}: mean, standard deviation, range" for each in measures)
    lines = [
        f"| {task.name}, {task.unit}, lr {task.main_rate:g} | {titles} | updates | seeds |",
        "|---" * (len(measures) + 3) + "|",
    ]
    for name, rows in groups.items():
        cells = [
            TITLES[name],
            *(_cell(values(rows, each), each) for each in measures),
            " ".join(sorted({row["updates"] for row in rows})),
            " ".join(sorted(row["seed"] for row in rows)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(found: Sequence[float], measure: Measure) -> str:
    """Mean, standard deviation and range, of the runs that did not break down."""
    if len(found) < 2:
        return " ".join(map(measure.show, found))
    mean, spread = statistics.fmean(found), statistics.stdev(found)
    low, high = measure.show(min(found)), measure.show(max(found))
    return f"{measure.show(mean)} ± {measure.show(spread)} ({low} to {high})"


def _orders(groups: Mapping[str, list[Row]], measure: Measure) -> str:
    """A line for each pair of windows."""
    lines = [
        f"| {measure.title} | gap of the means | both standard deviations | order |",
        "|---" * 4 + "|",
    ]
    for smaller, larger in combinations(groups, 2):
        order = order_of(groups[smaller], groups[larger], measure)
        if order is not None:
            unit = f" {measure.unit}" if measure.unit else ""
            better = larger if (order.gap > 0) == (measure is ACCURACY) else smaller
            verdict = f"window {better} is better" if order.is_claimed else "none claimed"
            lines.append(
                f"| window {larger} against {smaller} | {order.gap:+.3g}{unit} | "
                f"{order.spread:.2g}{unit} | {verdict} |"
            )
    return "\n".join(lines) if len(lines) > 2 else ""


def _rates(rows: Sequence[Row], task: Task) -> str:
    """End to end, with the seed that all rates were tried with."""
    last = ORDER[-1]
    tried = {
        rate: [row for row in select(rows, task, rate, ORDER).get(last, [])
               if row["seed"] == str(task.sweep_seed)]
        for rate in task.rates
    }  # fmt: skip
    titles = " | ".join(f"lr {rate:g}" for rate in tried)
    cells = " | ".join(
        " ".join(HELD_OUT.show(value) for value in values(found, HELD_OUT))
        for found in tried.values()
    )
    return "\n".join(
        [
            f"| {task.name}, {HELD_OUT.title}, {TITLES[last]}, seed {task.sweep_seed} | {titles} |",
            "|---" * (len(tried) + 1) + "|",
            f"| {task.unit} | {cells} |",
        ]
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Of each task the training curves, and each seed's result."""
    tasks = [t.task for t in TRIALS if any(row["task"] == t.task.name for row in rows)]
    if not tasks:
        return
    figure, panels = plt.subplots(
        2, len(tasks), figsize=(5.5 * len(tasks), 8), layout="constrained", squeeze=False
    )
    for task, (curves, dots) in zip(tasks, panels.T, strict=True):
        own = [row for row in rows if row["task"] == task.name]
        groups = {
            TITLES[name]: group for name, group in select(own, task, task.main_rate, ORDER).items()
        }
        draw_curves(curves, groups, task, COLORS)
        draw_seeds(dots, groups, judged_by(own))
    panels[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_seeds(axes: plt.Axes, groups: Mapping[str, list[Row]], measure: Measure) -> None:
    """A hollow dot for each seed; a full one with a bar for the mean and the standard deviation."""
    for place, (name, rows) in enumerate(groups.items()):
        found = values(rows, measure)
        axes.plot([place] * len(found), found, "o", mfc="white", mec=COLORS[name], ms=5)
        if len(found) > 1:
            mean, spread = statistics.fmean(found), statistics.stdev(found)
            axes.errorbar(place + 0.2, mean, spread, fmt="o", color=COLORS[name], ms=7, capsize=4)
    axes.set_xticks(range(len(groups)), [name.replace(" (", "\n(") for name in groups])
    axes.set_xlim(-0.5, len(groups) - 0.3)
    if measure is ACCURACY:
        axes.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1, decimals=1))
    axes.set(title=f"{measure.title}; hollow: one seed, full: mean and standard deviation")
    axes.title.set_fontsize(9)
    axes.grid(axis="y", alpha=0.3)
