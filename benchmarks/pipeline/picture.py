"""Pictures of pipelines: accuracy, learning rates, throughput, bubbles."""

import statistics
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import pictures
from benchmarks.harness.pictures import BLACK, BLUE, GRAY, GREEN, ORANGE, PURPLE, RED, SKY
from benchmarks.harness.rows import Row
from benchmarks.harness.tables import grouped, mean, mean_losses, of, values, where
from benchmarks.pipeline import table
from benchmarks.pipeline.limit import Limit
from benchmarks.pipeline.tasks import TASKS, Task

COLORS = dict(zip(table.ORDER, [BLACK, ORANGE, SKY, PURPLE, GRAY, GREEN, RED], strict=True))


def trained(rows: Sequence[Row]) -> list[tuple[Task, list[Row]]]:
    found = [(task, where(rows, task=task.name)) for task in TASKS]
    return [(task, own) for task, own in found if own]


def trained_at_rates(rows: Sequence[Row]) -> list[tuple[Task, list[Row]]]:
    return [(task, own) for task, own in trained(rows) if len(task.rates) > 1]


@pictures.shows(trained)
def draw_accuracy(found: Sequence[tuple[Task, list[Row]]]) -> Figure:
    title = "What do stale weights cost? Held-out scores against GPipe's"
    figure, axes = pictures.panels(title, len(found), 4.2, sharey=True)
    for own, (task, of_task) in zip(axes, found, strict=True):
        groups = table.select(of_task, task, task.main_rate)
        measure = table.measure_of(of_task)
        baseline = groups.pop(table.BASELINE, [])
        apart = {n: table.finite_differences(g, baseline, measure) for n, g in groups.items()}
        pictures.dots(own, apart, measure.limit)
        own.set_title(f"{task.name}, lr {task.main_rate:g}")
        own.set_xlabel(f"{measure.title}, {measure.unit}\n(further {measure.better} is better)")
    figure.supxlabel("hollow: one seed; full: their mean", fontsize=10)
    return figure


@pictures.shows(trained_at_rates)
def draw_losses(found: Sequence[tuple[Task, list[Row]]]) -> Figure:
    figure, axes = pictures.panels("Do stale weights slow training down?", len(found), 4.4)
    for own, (task, of_task) in zip(axes, found, strict=True):
        draw_curves(own, table.select(of_task, task, task.main_rate), task, COLORS)
    pictures.legend(figure, axes[0], 4)
    return figure


def draw_curves(
    axes: Axes, groups: Mapping[str, list[Row]], task: Task, colors: Mapping[str, str]
) -> None:
    for name, group in groups.items():
        means = mean_losses(group)
        updates = int(group[0]["updates"])
        places = [updates * (part + 1) / len(means) for part in range(len(means))]
        begin = len(means) // 10  # the steep start would flatten the rest
        axes.plot(places[begin:], means[begin:], color=colors[name], label=name, linewidth=1.4)
    axes.set(xlabel="updates", ylabel=f"training loss, {task.unit}")
    axes.set_title(f"{task.name}, lr {task.main_rate:g}")
    scale(axes)


@pictures.shows(trained_at_rates)
def draw_rates(found: Sequence[tuple[Task, list[Row]]]) -> Figure:
    """Draw the loss of the last tenth at each rate; a cross near the top for a diverged run."""
    figure, axes = pictures.panels("Which learning rates do schedules bear?", len(found), 4.4)
    for own, (task, of_task) in zip(axes, found, strict=True):
        draw_sweep(own, of_task, task)
    pictures.legend(figure, axes[0], 4)
    return figure


def draw_sweep(axes: Axes, rows: Sequence[Row], task: Task) -> None:
    at_rates, names = table.swept(rows, task)
    for index, name in enumerate(names):
        means = []
        for rate, groups in at_rates.items():
            found = values(groups.get(name, []), table.TRAINING)
            axes.plot([rate] * len(found), found, "o", mfc="white", mec=COLORS[name], ms=4)
            if len(found) < len(groups.get(name, [])):
                top = axes.get_xaxis_transform()
                axes.plot(rate, 0.98 - 0.05 * index, "x", color=COLORS[name], transform=top, ms=8)
            elif found:
                means.append((rate, statistics.fmean(found)))
        if means:
            axes.plot(*zip(*means, strict=True), color=COLORS[name], label=name)
    axes.set(xscale="log", ylabel=f"training loss at the end, {task.unit}")
    axes.set_xlabel("learning rate; cross: a seed diverged")
    axes.set_title(task.name)
    axes.set_xticks(task.rates, [f"{rate:g}" for rate in task.rates])
    axes.set_xticks([], minor=True)
    scale(axes)


def scale(axes: Axes) -> None:
    """Use a log scale if losses fall by an order of magnitude."""
    low, high = axes.dataLim.intervaly
    if high > 10 * low > 0:
        axes.set_yscale("log")
    axes.grid()


@pictures.shows_part("throughput")
def draw_throughput(rows: Sequence[Row]) -> Figure:
    rows = [row for row in rows if row["system"] != Limit.name]
    title = "How fast is a pipeline? Blue: pyparallel, gray: torch"
    figure, axes = pictures.bars_by_case(rows, title, 4.8, "of_limit", "{:.2f}")
    for own in axes:
        own.axvline(1, color=BLACK, lw=1)
        own.set_xlim(0, 1.25)
        own.set_title(f"{own.get_title()} microbatches")
    figure.supxlabel(f"speed; 1 is {rows[0]['ranks']} ranks that compute and never wait")
    return figure


@pictures.shows_part("bubbles")
def draw_bubbles(rows: Sequence[Row]) -> Figure:
    title = "How long do ranks wait? Blue: pyparallel, gray: torch"
    figure, axes = pictures.bars_by_case(rows, title, 5.0, "bubble", "{:.0f}", scale=100)
    for own, of_case in zip(axes, grouped(rows, "case").values(), strict=True):
        simulated = [100 * float(row["bubble_on_paper"]) for row in of_case]
        own.plot(simulated, range(len(of_case)), "|", color=RED, ms=13, mew=2)
    figure.supxlabel(
        "% of all ranks' time; bar: measured, with stages that sleep; red line: simulated"
    )
    return figure


@pictures.shows(
    lambda rows: [row for row in rows if "stages" in row and row["updates"] == table.SEARCHED]
)
def draw_sweeps(rows: Sequence[Row]) -> Figure:
    shown = [(name, table.PLAIN) for name in ("GPipe", "2BW", "PipeDream", "PipeOptim")]
    colors = dict(zip(shown, [BLACK, SKY, ORANGE, GREEN], strict=True))
    depths = [depth for depth in of(rows, "stages") if depth != "2"]
    figure, axes = pictures.panels("Which rates do delayed gradients bear?", len(depths), 4.4)
    for own, depth in zip(axes, depths, strict=True):
        of_depth = where(rows, stages=depth)
        for contestant, color in colors.items():
            for optimizer, name in table.OPTIMIZERS.items():
                found = table.trained(of_depth, contestant, optimizer)
                points = sorted((float(row["rate"]), table.bits(row)) for row in found)
                if points:
                    style = {"color": color, "label": f"{contestant[0]}, {name}", "marker": "."}
                    own.plot(*zip(*points, strict=True), LINES[optimizer], **style)
        own.set(xscale="log", xlabel="learning rate", ylabel="held-out bits per byte")
        own.set_title(f"{depth} stages, {table.SEARCHED} updates, one seed")
        own.set_xticks([], minor=True)
        own.set_xticks(
            [0.003, 0.006, 0.012, 0.024, 0.048], ["0.003", ".006", ".012", ".024", ".048"]
        )
        low = min(map(table.bits, of_depth))
        own.set_ylim(low - 0.03, low + 0.9)
        own.grid()
    pictures.legend(figure, axes[0], 2)
    return figure


LINES = {"adamw": "--", "muon": "-"}


@pictures.shows(table.long_runs)
def draw_finals(rows: Sequence[Row]) -> Figure:
    depths = of(rows, "stages")
    title = "Do delayed gradients cost loss? Each contestant at its own best rate"
    figure, axes = pictures.panels(title, len(depths), 4.2, sharey=True)
    names = [(who, optimizer) for optimizer in table.OPTIMIZERS for who in table.contestants(rows)]
    for own, depth in zip(axes, depths, strict=True):
        of_depth = where(rows, stages=depth)
        for place, (contestant, optimizer) in enumerate(names):
            group = table.best_runs(of_depth, contestant, optimizer)
            if not group:
                continue
            color = BLUE if optimizer == "muon" else GRAY
            found = list(map(table.bits, group))
            own.plot(found, [place] * len(group), "o", mfc="white", mec=color)
            own.plot([table.mean_bits(group)], [place], "o", color=color, ms=8)
        exact = table.best_runs(of_depth, table.GPIPE, "adamw")
        own.axvline(table.mean_bits(exact), color=BLACK, lw=1)
        own.set_title(f"{depth} stages")
        own.grid(axis="x")
    labels = [f"{table.label(who)}, {table.OPTIMIZERS[optimizer]}" for who, optimizer in names]
    axes[0].set_yticks(range(len(names)), labels)
    axes[0].invert_yaxis()
    figure.supxlabel(
        "held-out bits per byte; hollow: one seed; full: their mean; line: GPipe with AdamW",
        fontsize=10,
    )
    return figure


@pictures.shows(lambda rows: [row for row in rows if "seconds" in row])
def draw_race(rows: Sequence[Row]) -> Figure:
    figure, (axes,) = pictures.panels("Loss over time: two ranks that compute, one run", 1, 4.4)
    for system in of(rows, "system"):
        for optimizer, name in table.OPTIMIZERS.items():
            found = grouped(where(rows, system=system, optimizer=optimizer), "updates")
            points = [(mean(own, "seconds"), mean(own, "held_out_bits")) for own in found.values()]
            color = GRAY if system.startswith("torch") else BLUE
            style = {"color": color, "label": f"{system}, {name}"}
            axes.plot(*zip(*points, strict=True), LINES[optimizer], **style)
    axes.set(xlabel="seconds of training", ylabel="held-out bits per byte")
    lowest = min(map(table.bits, rows))
    axes.set_ylim(lowest - 0.05, lowest + 1.2)
    axes.grid()
    pictures.legend(figure, axes, 2)
    return figure


PICTURES = {
    "accuracy": draw_accuracy,
    "losses": draw_losses,
    "rates": draw_rates,
    "throughput": draw_throughput,
    "bubbles": draw_bubbles,
    "sweeps": draw_sweeps,
    "finals": draw_finals,
    "race": draw_race,
}

if __name__ == "__main__":
    pictures.main(PICTURES)
