"""Pictures of subnets: the score over seconds and bytes, and the sketches of the theory."""

from collections.abc import Sequence
from functools import partial

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.harness import pictures
from benchmarks.harness.pictures import BLACK, BLUE, GRAY, GREEN, ORANGE, SKY, panels
from benchmarks.harness.rows import Row
from benchmarks.harness.tables import grouped, numbers, where
from benchmarks.subnets.table import best_rows, by_method, read_curve

SHOWN = {"digits": (0.9, 1.0)}  # range of scores; below it all rise alike
COLORS = {
    "DDP": BLACK,
    "DDP, bf16 hook": GRAY,
    "LocalSGD": ORANGE,
    "SubnetTrainer": BLUE,
    "SubnetTrainer, averaged": GREEN,
    "SubnetTrainer, 2 copies": SKY,
    "SubnetTrainer, 4 copies": ORANGE,
}
OF_SKETCH = {"whole": GRAY, "plain": ORANGE, "preconditioned": GREEN, "heterogeneous": BLUE}
LABELS = {
    "whole": "gradient descent, no sketch",
    "plain": "PermK",
    "preconditioned": "PermK, preconditioned",
    "heterogeneous": "PermK, a diagonal per rank",
}
OF_GRADIENT = {
    "gradient descent": GRAY,
    "subnetworks": BLUE,
    "subnetworks, 10 local steps": SKY,
    "compressed gradients": ORANGE,
    "EF21": GREEN,
}
DASHES = ["-", ":"]  # of the largest and the smallest step


def draw_race(rows: Sequence[Row], task: str) -> Figure | None:
    groups = by_method(where(rows, task=task), task)
    if not groups:
        return None
    some = next(iter(groups.values()))[0]
    link = some["link"].replace("loopback", "no limit")
    title = f"How soon is the model good? {task.capitalize()}, {some['ranks']} ranks, {link} each"
    figure, (left, right) = panels(title, 2, 4.2, sharey=True)
    for name, group in groups.items():
        curves = [read_curve(row) for row in group]
        draw_mean(left, name, [(curve.seconds, curve.scores) for curve in curves])
        draw_mean(right, name, [(curve.megabytes, curve.scores) for curve in curves])
    left.set(xlabel="seconds of training", ylabel=some["measure"], ylim=SHOWN.get(task))
    right.set(xlabel="MB sent by a rank", xscale="log")
    right.set_xlim(1, None)  # before the first merge nothing is sent
    right.xaxis.set_major_formatter("{x:g}")
    if task in SHOWN:
        left.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1, decimals=0))
    for axes in (left, right):
        axes.grid()
    left.legend(loc="lower right" if task in SHOWN else "upper right")
    return figure


def draw_mean(axes: Axes, name: str, curves: Sequence[tuple[list[float], list[float]]]) -> None:
    """Draw the mean of the seeds, in a band from minimum to maximum."""
    places = sorted({place for xs, _ in curves for place in xs})
    last = min(xs[-1] for xs, _ in curves)
    places = [place for place in places if place <= last]
    values = np.array([np.interp(places, xs, ys) for xs, ys in curves])
    color = COLORS.get(name)
    axes.plot(places, values.mean(0), color=color, label=name, linewidth=1.8)
    axes.fill_between(places, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)


def draw_sketches(rows: Sequence[Row], field: str, title: str, ylabel: str) -> Figure | None:
    whole = () if field == "to_solution_at" else ("whole",)
    rows = [row for row in rows if "sketch" in row and row["sketch"] not in whole]
    if not rows:
        return None
    sizes = sorted({int(row["ranks"]) for row in rows})
    steps = sorted({float(row["relative_step"]) for row in rows})
    dashes = dict(zip(dict.fromkeys((steps[-1], steps[0])), DASHES, strict=False))
    figure, all_axes = panels(title, len(sizes), 4.2, sharey=True)
    for axes, size in zip(all_axes, sizes, strict=True):
        for row in where(rows, ranks=str(size)):
            if dash := dashes.get(float(row["relative_step"])):
                color, rounds = OF_SKETCH[row["sketch"]], numbers(row["rounds"])
                axes.plot(rounds, numbers(row[field]), dash, color=color, linewidth=1.6)
        axes.set_title(f"{size} ranks")
        axes.set_xlabel("round")
        axes.set_xscale("symlog", linthresh=1, linscale=0.3)
        axes.set_xlim(0)
        axes.set_xticks([0, 1, 10, 100], ["0", "1", "10", "100"])
        axes.set_yscale("log")
        axes.grid()
    all_axes[0].set_ylabel(ylabel)
    if field == "to_solution_at":
        all_axes[0].set_ylim(0.05, 2)
    found = sorted({row["sketch"] for row in rows}, key=list(OF_SKETCH).index)
    lines = [Line2D([], [], color=OF_SKETCH[each], label=LABELS[each]) for each in found]
    for step, dash in dashes.items():
        label = f"{step:g} of the largest step" if step < 1 else "the largest step"
        lines.append(Line2D([], [], color=BLACK, linestyle=dash, label=label))
    figure.legend(handles=lines, loc="outside lower center", ncols=3)
    return figure


def draw_gradients(rows: Sequence[Row]) -> Figure | None:
    """Draw the distance to the solution over updates, of one problem for each number of ranks."""
    rows = [row for row in rows if row.get("task") == "quadratic" and "to_solution_at" in row]
    if not rows:
        return None
    sizes = sorted({int(row["ranks"]) for row in rows})
    rows = where(rows, seed=min(row["seed"] for row in rows))
    title = "Subnetworks stay at a limit of their own, compressed gradients go on"
    figure, all_axes = panels(title, len(sizes), 4.2, sharey=True)
    for axes, size in zip(all_axes, sizes, strict=True):
        for row in where(rows, ranks=str(size)):
            if dash := {"1": "-", "0.1": ":"}.get(row["relative_step"]):
                color, rounds = OF_GRADIENT[row["method"]], numbers(row["rounds"])
                axes.plot(rounds, numbers(row["to_solution_at"]), dash, color=color, linewidth=1.6)
        axes.set(title=f"{size} ranks", xlabel="update", yscale="log", ylim=(1e-4, 2))
        axes.set_xscale("symlog", linthresh=10, linscale=0.3)
        axes.set_xlim(0)
        axes.set_xticks([0, 10, 100, 1000, 10000], ["0", "10", "100", "1k", "10k"])
        axes.grid()
    all_axes[0].set_ylabel("distance to $x^*$, of $|x^*|$")
    add_gradient_legend(figure, rows)
    return figure


def draw_received(rows: Sequence[Row]) -> Figure | None:
    """Draw the test loss over what a rank receives, each method at its own best step size."""
    rows = [row for row in rows if row.get("task") == "network" and "received_numbers" in row]
    if not rows:
        return None
    sizes = sorted({int(row["ranks"]) for row in rows})
    figure, all_axes = panels("The same network, by what a rank receives", len(sizes), 4.2,
                              sharey=True)  # fmt: skip
    for axes, size in zip(all_axes, sizes, strict=True):
        for method, group in grouped(where(rows, ranks=str(size)), "method").items():
            best = best_rows(group)
            received = float(best[0]["received_numbers"]) * 4 / 1e6
            losses = np.mean([numbers(row["loss_at"]) for row in best], axis=0)
            megabytes = [update * received for update in numbers(best[0]["rounds"])]
            axes.plot(megabytes, losses, color=OF_GRADIENT[method], linewidth=1.6)
        axes.set(title=f"{size} ranks", xlabel="MB received by a rank", yscale="log")
        axes.set_xscale("log")
        axes.grid()
    all_axes[0].set_ylabel("test loss, mean of seeds")
    add_gradient_legend(figure, rows)
    return figure


def add_gradient_legend(figure: Figure, rows: Sequence[Row]) -> None:
    found = sorted({row["method"] for row in rows}, key=list(OF_GRADIENT).index)
    lines = [Line2D([], [], color=OF_GRADIENT[each], label=each) for each in found]
    if any(row["relative_step"] for row in rows):
        for dash, step in (("-", "the largest step"), (":", "0.1 of it")):
            lines.append(Line2D([], [], color=BLACK, linestyle=dash, label=step))
    figure.legend(handles=lines, loc="outside lower center", ncols=3)


PICTURES = {
    "digits": partial(draw_race, task="digits"),
    "bytes": partial(draw_race, task="bytes"),
    "to-solution": partial(
        draw_sketches,
        field="to_solution_at",
        title="How near to the solution do sketches come?",
        ylabel="distance to $x^*$, of $|x^*|$",
    ),
    "to-limit": partial(
        draw_sketches,
        field="to_limit_at",
        title="How near does each sketch come to its own limit?",
        ylabel="distance to $x^\\infty$, of $|x^\\infty|$",
    ),
    "gradients": draw_gradients,
    "received": draw_received,
}

if __name__ == "__main__":
    pictures.main(PICTURES)
