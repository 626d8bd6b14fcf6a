"""Pictures of interlocking backpropagation: accuracy, step times, and a slow last stage."""

import statistics
from collections.abc import Sequence
from functools import partial

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.harness import pictures
from benchmarks.harness.pictures import BLACK, BLUE, GRAY, GREEN, ORANGE, RED, SKY
from benchmarks.harness.rows import Row
from benchmarks.harness.tables import grouped, values, where
from benchmarks.interlocking.table import ORDER, chosen, judged_by, title
from benchmarks.interlocking.tasks import TRIALS
from benchmarks.pipeline.picture import draw_curves
from benchmarks.pipeline.table import ACCURACY, select
from benchmarks.pipeline.tasks import Task

OF_WINDOW = dict(zip("1234", [RED, ORANGE, SKY, BLACK], strict=True))
OF_SYSTEM = {
    **{f"Interlocking, window {window}": color for window, color in OF_WINDOW.items()},
    "OneForwardOneBackward": GRAY,
    "torch 1F1B": GRAY,
    "PipeOptim": GREEN,
}


def trained(rows: Sequence[Row]) -> list[tuple[Task, list[Row]]]:
    found = [(trial.task, where(rows, task=trial.task.name)) for trial in TRIALS]
    return [(task, own) for task, own in found if own]


def draw_accuracy(rows: Sequence[Row], name: str) -> Figure | None:
    found = [(task, own) for task, own in trained(rows) if task.name == name]
    if not found:
        return None
    ((task, own),) = found
    groups = chosen(own, task)
    measure = judged_by(own)
    figure, (axes,) = pictures.panels(
        f"Which window learns best? {name[0].upper()}{name[1:]}", 1, 4.4
    )
    for place, (contestant, group) in enumerate(groups.items()):
        seeds, color = values(group, measure), OF_WINDOW[contestant[0]]
        axes.plot(seeds, [place] * len(seeds), "o", mfc="white", mec=color, ms=5)
        if len(seeds) > 1:
            average, spread = statistics.fmean(seeds), statistics.stdev(seeds)
            axes.errorbar(average, place + 0.25, xerr=spread, fmt="o", color=color, ms=7, capsize=3)
    axes.set_yticks(range(len(groups)), [title(contestant) for contestant in groups])
    axes.set_ylim(len(groups) - 0.4, -0.6)
    if measure is ACCURACY:
        axes.xaxis.set_major_formatter(mpl.ticker.PercentFormatter(1, decimals=0))
    better = "right" if measure is ACCURACY else "left"
    unit = "" if measure is ACCURACY else f", {task.unit}"
    axes.set_xlabel(
        f"{measure.title}{unit}, further {better} is better\n"
        "hollow: one seed; full: mean and standard deviation"
    )
    axes.grid(axis="x")
    return figure


@pictures.shows(trained)
def draw_losses(found: Sequence[tuple[Task, list[Row]]]) -> Figure:
    figure, axes = pictures.panels("How fast does each window learn?", len(found), 4.2)
    colors = {title(window): color for window, color in OF_WINDOW.items()}
    for own, (task, of_task) in zip(axes, found, strict=True):
        groups = select(of_task, task, task.main_rate, ORDER)
        plain = {title(name): group for name, group in groups.items() if name in OF_WINDOW}
        draw_curves(own, plain, task, colors)
        own.set_title(own.get_title().replace(", ", "\n"))
    pictures.legend(figure, axes[0], 4)
    return figure


@pictures.shows_part("windows")
def draw_windows(rows: Sequence[Row]) -> Figure:
    name = "How long is a step? Four stages that sleep"
    color = OF_SYSTEM.__getitem__
    figure, axes = pictures.bars_by_case(rows, name, 3.4, "median_ms", "{:.0f}", color)
    for own in axes:
        own.set_title(f"{own.get_title()} microbatch{'es' if own.get_title() != 'M = 1' else ''}")
        own.set_xlabel("ms per step")
    return figure


@pictures.shows_part("straggler")
def draw_straggler(rows: Sequence[Row]) -> Figure:
    title = "When does a slow last stage slow the first one down?"
    figure, (axes,) = pictures.panels(title, 1, 4.4)
    highest = max(float(row["median_ms"]) for row in rows)
    ends = {}
    for system, own in grouped(rows, "system").items():
        steps = [int(row["case"].removeprefix("step t") or 0) for row in own]
        times = [float(row["median_ms"]) for row in own]
        line = "o--" if system == "OneForwardOneBackward" else "o-"  # may hide others
        axes.plot(steps, times, line, color=OF_SYSTEM[system], ms=5)
        ends[system] = (steps[-1], times[-1], OF_SYSTEM[system])
    pictures.label_ends(axes, ends, 0.06 * highest)
    axes.axvspan(-0.1, steps[-1] + 0.1, color="0.95", zorder=0)
    axes.set_xticks(steps, [f"t{step:+d}" if step else "t" for step in steps])
    axes.set(ylabel="ms per step of the first stage", ylim=(0, 1.15 * highest))
    axes.set_xlabel("step; gray: the last stage's backward takes longer")
    return figure


@pictures.shows(lambda rows: where(rows, part="cotangents", system="together"))
def draw_cotangents(rows: Sequence[Row]) -> Figure:
    title = "Does propagating gradients together save time?"
    figure, (axes,) = pictures.panels(title, 1, 1.4 + 0.34 * len(rows))
    names = [f"{row['compute'].removesuffix(', 1 thread')}, {row['case']}" for row in rows]
    pictures.bars(axes, names, [float(row["ratio"]) for row in rows], [BLUE] * len(rows), "{:.2f}")
    axes.axvline(1, color=BLACK, lw=1)
    axes.set_xlabel("time; 1 is one gradient after the other")
    return figure


PICTURES = {
    "accuracy-digits": partial(draw_accuracy, name="digits"),
    "accuracy-bytes": partial(draw_accuracy, name="bytes"),
    "accuracy-long-bytes": partial(draw_accuracy, name="long bytes"),
    "accuracy-sums": partial(draw_accuracy, name="sums"),
    "accuracy-mnist-sums": partial(draw_accuracy, name="MNIST sums"),
    "losses": draw_losses,
    "windows": draw_windows,
    "straggler": draw_straggler,
    "gradients-together": draw_cotangents,
}

if __name__ == "__main__":
    pictures.main(PICTURES)
