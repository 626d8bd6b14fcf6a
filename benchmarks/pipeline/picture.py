"""Pictures of pipelines: accuracy, learning rates, throughput, bubbles.

``python -m benchmarks.pipeline.picture FILE.csv`` draws those that the file has rows for.
"""

import statistics
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import pictures
from benchmarks.harness.pictures import (
    BLACK,
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    bars,
    dots,
    legend,
    mean,
    of,
    ours_and_torch,
    panels,
    where,
)
from benchmarks.harness.rows import Row
from benchmarks.pipeline.limit import Limit
from benchmarks.pipeline.table import (
    BASELINE,
    GPIPE,
    OPTIMIZERS,
    ORDER,
    PLAIN,
    SEARCHED,
    TRAINING,
    bits,
    contestants,
    differences,
    label,
    long_runs,
    mean_bits,
    measure_of,
    select,
    values,
)
from benchmarks.pipeline.table import trained as trained_with
from benchmarks.pipeline.tasks import TASKS, Task

COLORS = dict(zip(ORDER, [BLACK, ORANGE, SKY, PURPLE, GRAY, GREEN, RED], strict=True))


def trained(rows: Sequence[Row], swept: bool = False) -> list[tuple[Task, list[Row]]]:
    """Return the tasks that have rows, or those trained at several rates, with their rows."""
    found = [(task, where(rows, task=task.name)) for task in TASKS]
    return [(task, own) for task, own in found if own and (len(task.rates) > 1 or not swept)]


def draw_accuracy(rows: Sequence[Row]) -> Figure | None:
    """Draw the differences from GPipe at the main rate."""
    found = trained(rows)
    if not found:
        return None
    title = "What do stale weights cost? Held-out scores against GPipe's"
    figure, axes = panels(title, len(found), 4.2, sharey=True)
    for own, (task, of_task) in zip(axes, found, strict=True):
        groups = select(of_task, task, task.main_rate)
        measure = measure_of(of_task)
        baseline = groups.pop(BASELINE, [])
        dots(own, {n: differences(g, baseline, measure) for n, g in groups.items()}, measure.limit)
        better = "right" if measure.unit == "points" else "left"
        own.set_title(f"{task.name}, lr {task.main_rate:g}")
        own.set_xlabel(f"{measure.title}, {measure.unit}\n(further {better} is better)")
    figure.supxlabel("hollow: one seed; full: their mean", fontsize=10)
    return figure


def draw_losses(rows: Sequence[Row]) -> Figure | None:
    """Draw the mean training loss of each schedule by update."""
    found = trained(rows, swept=True)
    if not found:
        return None
    title = "Do stale weights slow training down?"
    figure, axes = panels(title, len(found), 4.4)
    for own, (task, of_task) in zip(axes, found, strict=True):
        draw_curves(own, select(of_task, task, task.main_rate), task, COLORS)
    legend(figure, axes[0], 4)
    return figure


def draw_curves(
    axes: Axes, groups: Mapping[str, list[Row]], task: Task, colors: Mapping[str, str]
) -> None:
    """Draw the mean over seeds of each group."""
    for name, group in groups.items():
        curves = [[float(loss) for loss in row["losses"].split()] for row in group]
        means = [statistics.fmean(part) for part in zip(*curves, strict=False)]
        updates = int(group[0]["updates"])
        places = [updates * (part + 1) / len(means) for part in range(len(means))]
        begin = len(means) // 10  # the steep start would flatten the rest
        axes.plot(places[begin:], means[begin:], color=colors[name], label=name, linewidth=1.4)
    axes.set(xlabel="updates", ylabel=f"training loss, {task.unit}")
    axes.set_title(f"{task.name}, lr {task.main_rate:g}")
    scale(axes)


def draw_rates(rows: Sequence[Row]) -> Figure | None:
    """Draw the loss of the last tenth at each rate; a cross near the top for a diverged run."""
    found = trained(rows, swept=True)
    if not found:
        return None
    figure, axes = panels("Which learning rates do schedules bear?", len(found), 4.4)
    for own, (task, of_task) in zip(axes, found, strict=True):
        draw_sweep(own, of_task, task)
    legend(figure, axes[0], 4)
    return figure


def draw_sweep(axes: Axes, rows: Sequence[Row], task: Task) -> None:
    """Draw the schedules that were trained at several rates."""
    at_rates = {rate: select(rows, task, rate) for rate in task.rates}
    swept = [name for name in ORDER if sum(name in groups for groups in at_rates.values()) > 1]
    for index, name in enumerate(swept):
        means = []
        for rate, groups in at_rates.items():
            found = values(groups.get(name, []), TRAINING)
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


def draw_throughput(rows: Sequence[Row]) -> Figure | None:
    """Draw the fraction of the limit that each system reaches."""
    rows = [row for row in where(rows, part="throughput") if row["system"] != Limit.name]
    if not rows:
        return None
    title = "How fast is a pipeline? Blue: pyparallel, gray: torch"
    cases, systems = of(rows, "case"), of(rows, "system")
    figure, axes = panels(title, len(cases), 4.8, sharey=True)
    for own, case in zip(axes, cases, strict=True):
        shares = {row["system"]: float(row["of_limit"]) for row in where(rows, case=case)}
        found = [shares.get(system, float("nan")) for system in systems]
        bars(own, systems, found, ours_and_torch(systems), "{:.2f}")
        own.axvline(1, color=BLACK, lw=1)
        own.set_xlim(0, 1.25)
        own.set_title(f"{case} microbatches")
    figure.supxlabel(
        f"speed; 1 is {rows[0]['ranks']} ranks that compute and never wait", fontsize=11
    )
    return figure


def draw_bubbles(rows: Sequence[Row]) -> Figure | None:
    """Draw the measured bubbles as bars, the simulated ones as marks."""
    rows = where(rows, part="bubbles")
    if not rows:
        return None
    title = "How long do ranks wait? Blue: pyparallel, gray: torch"
    cases, systems = of(rows, "case"), of(rows, "system")
    figure, axes = panels(title, len(cases), 5.0, sharey=True)
    for own, case in zip(axes, cases, strict=True):
        found = {row["system"]: row for row in where(rows, case=case)}
        shares = [100 * float(found[system]["bubble"]) for system in systems]
        bars(own, systems, shares, ours_and_torch(systems), "{:.0f}")
        simulated = [100 * float(found[system]["bubble_on_paper"]) for system in systems]
        own.plot(simulated, range(len(systems)), "|", color=RED, ms=13, mew=2)
        own.set_title(case)
    figure.supxlabel(
        "% of all ranks' time; bar: measured, with stages that sleep; red line: simulated",
        fontsize=11,
    )
    return figure


def draw_sweeps(rows: Sequence[Row]) -> Figure | None:
    """Draw the held-out loss of short runs at each rate, for each number of stages."""
    rows = [row for row in rows if row.get("updates") == SEARCHED and "stages" in row]
    if not rows:
        return None
    shown = [GPIPE, ("2BW", PLAIN), ("PipeDream", PLAIN), ("PipeOptim", PLAIN)]
    colors = dict(zip(shown, [BLACK, SKY, ORANGE, GREEN], strict=True))
    depths = [depth for depth in of(rows, "stages") if depth != "2"]
    figure, axes = panels("Which rates do delayed gradients bear?", len(depths), 4.4)
    for own, depth in zip(axes, depths, strict=True):
        of_depth = where(rows, stages=depth)
        for contestant, color in colors.items():
            for optimizer, name in OPTIMIZERS.items():
                found = sorted(trained_with(of_depth, contestant, optimizer), key=rate_of)
                points = [(rate_of(row), bits(row)) for row in found]
                if points:
                    style = "-" if optimizer == "muon" else "--"
                    title = f"{contestant[0]}, {name}"
                    own.plot(
                        *zip(*points, strict=True), style, marker=".", color=color, label=title
                    )
        own.set(xscale="log", xlabel="learning rate", ylabel="held-out bits per byte")
        own.set_title(f"{depth} stages, {SEARCHED} updates, one seed")
        own.set_xticks([], minor=True)
        own.set_xticks(
            [0.003, 0.006, 0.012, 0.024, 0.048], ["0.003", ".006", ".012", ".024", ".048"]
        )
        low = min(map(bits, of_depth))
        own.set_ylim(low - 0.03, low + 0.9)
        own.grid()
    legend(figure, axes[0], 2)
    return figure


def rate_of(row: Row) -> float:
    """Return the learning rate of a row."""
    return float(row["rate"])


def draw_finals(rows: Sequence[Row]) -> Figure | None:
    """Draw the held-out loss of the long runs at each one's own rate."""
    rows = [row for row in rows if "stages" in row and row["updates"] != SEARCHED]
    if not rows:
        return None
    depths = of(rows, "stages")
    title = "Do delayed gradients cost loss? Each contestant at its own best rate"
    figure, axes = panels(title, len(depths), 4.2, sharey=True)
    names = [(who, optimizer) for optimizer in OPTIMIZERS for who in contestants(rows)]
    for own, depth in zip(axes, depths, strict=True):
        of_depth = where(rows, stages=depth)
        for place, (contestant, optimizer) in enumerate(names):
            found = long_runs(of_depth, contestant, optimizer)
            if not found:
                continue
            group = min(found.values(), key=mean_bits)
            color = BLUE if optimizer == "muon" else GRAY
            own.plot(list(map(bits, group)), [place] * len(group), "o", mfc="white", mec=color)
            own.plot([mean_bits(group)], [place], "o", color=color, ms=8)
        baseline = min(long_runs(of_depth, GPIPE, "adamw").values(), key=mean_bits)
        own.axvline(mean_bits(baseline), color=BLACK, lw=1)
        own.set_title(f"{depth} stages")
        own.grid(axis="x")
    labels = [f"{label(who)}, {OPTIMIZERS[optimizer]}" for who, optimizer in names]
    axes[0].set_yticks(range(len(names)), labels)
    axes[0].invert_yaxis()
    figure.supxlabel(
        "held-out bits per byte; hollow: one seed; full: their mean; line: GPipe with AdamW",
        fontsize=10,
    )
    return figure


def draw_race(rows: Sequence[Row]) -> Figure | None:
    """Draw the held-out loss over seconds, the mean over seeds."""
    if not rows or "seconds" not in rows[0]:
        return None
    title = "Loss over time: two ranks that compute, one run"
    figure, (axes,) = panels(title, 1, 4.4)
    for system in of(rows, "system"):
        for optimizer, name in OPTIMIZERS.items():
            found = where(rows, system=system, optimizer=optimizer)
            points = []
            for updates in of(found, "updates"):
                group = where(found, updates=updates)
                points.append((mean(group, "seconds"), mean(group, "held_out_bits")))
            style = "-" if optimizer == "muon" else "--"
            color = GRAY if system.startswith("torch") else BLUE
            axes.plot(*zip(*points, strict=True), style, color=color, label=f"{system}, {name}")
    axes.set(xlabel="seconds of training", ylabel="held-out bits per byte")
    lowest = min(float(row["held_out_bits"]) for row in rows)
    axes.set_ylim(lowest - 0.05, lowest + 1.2)
    axes.grid()
    legend(figure, axes, 2)
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
