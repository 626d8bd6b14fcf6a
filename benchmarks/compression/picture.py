"""Pictures of compression: accuracy, time per step on each link, and host time."""

import re
from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure

from benchmarks.compression.cost import BACKWARD
from benchmarks.compression.systems import ALONE
from benchmarks.compression.table import by_compressor
from benchmarks.harness import pictures
from benchmarks.harness.options import shorten
from benchmarks.harness.pictures import BLACK, BLUE, GRAY
from benchmarks.harness.rows import Row
from benchmarks.harness.tables import differences, mean, measure_of, of, where
from pyparallel.planning.recommend import DENSE

AFTER_BF16 = re.compile(r"Switch\(\{0: Cast\(\), (\d+): (.*)\}\)")


def label(row: Row) -> str:
    """Return a system's compressor without defaults, and EF for ErrorFeedback."""
    name = row["compressor"] if "compressor" in row else row["system"]
    if name.startswith("torch") or name == DENSE.name:
        return "DDP, no compression" if name == DENSE.name else name
    text = shorten(row["options"]).replace("ErrorFeedback", "EF")
    text = re.sub(r", (learning_steps=\d+|dense_steps=0)", "", text)
    return AFTER_BF16.sub(r"\2, from step \1", text)


def rate(case: str) -> float:
    return float("inf") if case == "loopback" else float(case.split(maxsplit=1)[0])


def distinct(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that ran, one for each label."""
    ran = [row for row in rows if row["median_ms"]]
    return list({label(row): row for row in reversed(ran)}.values())[::-1]


def draw_accuracy(rows: Sequence[Row], data: str) -> Figure | None:
    measure = measure_of(data)
    groups = by_compressor(where(rows, task=data), data)
    baseline = groups.pop(DENSE.name, [])
    if not groups or not baseline:
        return None
    title = f"Do fewer bytes cost accuracy? {measure.title.capitalize()}"
    figure, (axes,) = pictures.panels(title, 1, 1.7 + 0.27 * len(groups))
    found = {
        f"{label(group[0])}, {mean(group, 'payload_share'):.0%}": differences(
            group, baseline, measure
        )
        for group in groups.values()
    }
    pictures.dots(axes, found, measure.limit, reach=4 * measure.limit)
    axes.tick_params(axis="y", labelsize=9)
    figure.supxlabel(
        f"difference from fp32, {measure.unit}, further {measure.better} is better "
        "(red: off the scale)\n"
        "EF: ErrorFeedback; from step N: bf16 before it; beside: messages, % of fp32's bytes"
    )
    return figure


@pictures.shows_part("links")
def draw_links(rows: Sequence[Row]) -> Figure:
    cases = sorted(of(rows, "case"), key=rate)
    systems = [row for row in distinct(where(rows, case=cases[0])) if row["system"] != ALONE]
    systems.sort(key=lambda row: float(row["median_ms"]))
    names = [row["system"] for row in systems]
    colors = [GRAY if name == DENSE.name else pictures.gray_if_torch(name) for name in names]
    labels = [label(row) for row in systems]
    title = "How long is a step of DDP? Blue: pyparallel, gray: torch"
    figure, axes = pictures.panels(title, len(cases), 6.2, sharey=True)
    for own, case in zip(axes, cases, strict=True):
        times = {row["system"]: row["median_ms"] for row in where(rows, case=case)}
        pictures.bars(own, labels, [float(times[name]) for name in names], colors, "{:.0f}")
        own.axvline(float(times[ALONE]), color=BLACK, linestyle=":", lw=1.4)
        own.set_title("no limit" if case == "loopback" else case)
        own.tick_params(axis="y", labelsize=9)
    figure.supxlabel("ms per step of the slower rank; dotted: computation alone; EF: ErrorFeedback")
    return figure


@pictures.shows(lambda rows: [row for row in where(rows, part="cost") if row["system"] != BACKWARD])
def draw_cost(rows: Sequence[Row]) -> Figure:
    found = sorted(distinct(rows), key=lambda row: float(row["ratio"]))
    title = f"What does encoding cost? {int(rows[0]['numel']) / 1e6:.0f} M parameters"
    figure, (axes,) = pictures.panels(title, 1, 5.2)
    shares = [100 * float(row["ratio"]) for row in found]
    pictures.bars(axes, list(map(label, found)), shares, [BLUE] * len(found), "{:.1f}")
    figure.supxlabel(
        f"encoding and decoding, % of a backward pass over {rows[0]['case']}; EF: ErrorFeedback"
    )
    return figure


@pictures.shows_part("power_sgd")
def draw_power_sgd(rows: Sequence[Row]) -> Figure:
    title = f"What does PowerSGD compute? {int(rows[0]['numel']) / 1e6:.0f} M parameters, rank 4"
    figure, (axes,) = pictures.panels(title, 1, 2.4)
    names = of(rows, "system")
    times, colors = (
        [float(row["median_ms"]) for row in rows],
        list(map(pictures.gray_if_torch, names)),
    )
    pictures.bars(axes, names, times, colors, "{:.1f}")
    axes.set_xlabel("ms per step, without communication")
    return figure


PICTURES = {
    "accuracy-digits": partial(draw_accuracy, data="digits"),
    "accuracy-text": partial(draw_accuracy, data="text"),
    "links": draw_links,
    "encoding": draw_cost,
    "power-sgd": draw_power_sgd,
}

if __name__ == "__main__":
    pictures.main(PICTURES)
