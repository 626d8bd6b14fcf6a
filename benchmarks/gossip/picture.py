"""Pictures of gossip: its accuracy, and its steps on slow links and beside slow ranks."""

import math
from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure

from benchmarks.gossip.table import BASELINE, by_algorithm, kilobytes
from benchmarks.gossip.trainers import ALONE, ROUND_ALONE
from benchmarks.harness import pictures
from benchmarks.harness.pictures import BLACK, BLUE, GRAY, GREEN, ORANGE, PURPLE, RED
from benchmarks.harness.rows import Row
from benchmarks.harness.tables import differences, mean_losses, measure_of, of, where

COLORS = {"DDP": GRAY, "DDP, bf16 hook": BLACK, "SGP": ORANGE, "SGP, overlap=1": BLUE}


def draw_accuracy(rows: Sequence[Row], data: str) -> Figure | None:
    measure = measure_of(data)
    groups = by_algorithm(where(rows, data=data), data)
    baseline = groups.pop(BASELINE, [])
    if not groups or not baseline:
        return None
    title = f"Does gossip cost accuracy? {measure.title.capitalize()}"
    figure, (axes,) = pictures.panels(title, 1, 1.6 + 0.34 * len(groups))
    found = {
        f"{name}, {kilobytes(group)} kB a step": differences(group, baseline, measure)
        for name, group in groups.items()
    }
    pictures.dots(axes, found, measure.limit)
    axes.set_xlabel(
        f"difference from all-reduce, {measure.unit}, further {measure.better} is better\n"
        "hollow: one seed; full: their mean"
    )
    axes.margins(x=0.1)
    return figure


@pictures.shows(lambda rows: where(rows, data="text"))
def draw_text_losses(rows: Sequence[Row]) -> Figure:
    figure, (axes,) = pictures.panels("What do the bytes buy? Training on text", 1, 4.2)
    colors = [BLACK, BLUE, ORANGE, GREEN, RED, PURPLE]
    for number, (name, group) in enumerate(by_algorithm(rows, "text").items()):
        bits = [loss / math.log(2) for loss in mean_losses(group)]
        total = [int(row["steps"]) * float(row["step_bytes"]) for row in group]
        megabytes = sum(total) / len(total) / 1e6
        sent = [megabytes * (part + 1) / len(bits) for part in range(len(bits))]
        axes.plot(sent, bits, color=colors[number % len(colors)], label=name)
    axes.set(xlabel="MB sent by a rank", ylabel="training loss, bits per byte", xscale="log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid()
    axes.legend()
    return figure


@pictures.shows_part("steps")
def draw_links(rows: Sequence[Row], sleeps: bool) -> Figure:
    rows = [row for row in rows if row["compute"].startswith("sl") == sleeps]
    what = "that sleeps for its computation" if sleeps else "that computes"
    figure, (axes,) = pictures.panels(f"How long is a step {what}, by link?", 1, 4.6)
    cases = of(rows, "case")
    times = {(row["case"], row["method"]): float(row["median_ms"]) for row in rows}
    methods = [name for name in of(rows, "method") if name not in (ALONE.name, ROUND_ALONE)]
    width = 0.84 / len(methods)
    for number, method in enumerate(methods):
        offset = (number - (len(methods) - 1) / 2) * width
        heights = [times[case, method] for case in cases]
        places = [index + offset for index in range(len(cases))]
        axes.bar(places, heights, 0.92 * width, label=method, color=COLORS[method])
        for place, height in zip(places, heights, strict=True):
            axes.annotate(f"{height:.0f}", (place, height), ha="center", va="bottom", fontsize=9)
    alone = [times[case, ALONE.name] for case in cases]
    left, right = ([index + side for index in range(len(cases))] for side in (-0.45, 0.45))
    axes.hlines(alone, left, right, color=RED, linestyles="--", lw=1.5, label=ALONE.name)
    axes.set_xticks(range(len(cases)), cases)
    axes.set_xlabel("link of each rank")
    axes.set_ylabel("ms per step of the slowest rank")
    axes.legend()
    return figure


@pictures.shows_part("stragglers")
def draw_stragglers(rows: Sequence[Row]) -> Figure:
    title = "How much longer is a step where ranks are slow?"
    slowed = [row for row in rows if row["case"] != rows[0]["case"]]
    color = {"DDP": GRAY}
    figure, axes = pictures.bars_by_case(
        slowed, title, 3.0, "lost_ms", "{:.1f}", lambda each: color.get(each, BLUE), "method"
    )
    for own in axes:
        own.set_title(own.get_title().replace(" longer with", " longer\nwith"))
        own.set_xlabel(f"ms more per step, which {rows[0]['compute'].replace('sleep', 'sleeps')}")
    return figure


PICTURES = {
    "accuracy-digits": partial(draw_accuracy, data="digits"),
    "accuracy-text": partial(draw_accuracy, data="text"),
    "text-losses": draw_text_losses,
    "links-sleeping": lambda rows: draw_links(rows, True),
    "links-computing": lambda rows: draw_links(rows, False),
    "stragglers": draw_stragglers,
}

if __name__ == "__main__":
    pictures.main(PICTURES)
