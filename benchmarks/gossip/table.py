"""The table and the picture of the rows of ``benchmarks.gossip.compare``."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

from benchmarks.harness.rows import Row

mpl.use("Agg")
from matplotlib import pyplot as plt

BASELINE = "allreduce"


@dataclass(frozen=True)
class Measure:
    """How scores on one dataset are compared and printed."""

    data: str
    title: str
    show: Callable[[float], str]
    difference: Callable[[float, float], float]
    unit: str
    limit: float


MEASURES = [
    Measure(
        data="digits",
        title="digits, test accuracy",
        show=lambda score: f"{score:.2%}",
        difference=lambda score, exact: 100 * (score - exact),
        unit="points",
        limit=1,
    ),
    Measure(
        data="text",
        title="text, held-out bits per byte",
        show=lambda score: f"{score:.3f}",
        difference=lambda score, exact: 100 * (score / exact - 1),
        unit="%",
        limit=2,
    ),
]


def by_algorithm(rows: Sequence[Row], data: str) -> dict[str, list[Row]]:
    """Return the rows of each algorithm on one dataset, the baseline first."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["data"] == data:
            groups.setdefault(row["algorithm"], []).append(row)
    return dict(sorted(groups.items(), key=lambda item: (item[0] != BASELINE, item[0])))


def differences(rows: Sequence[Row], baseline: Sequence[Row], measure: Measure) -> list[float]:
    """Return the difference to the baseline for each seed with equal numbers of steps and ranks."""
    exact = {(r["seed"], r["steps"], r["ranks"]): float(r["score"]) for r in baseline}
    keys = [(row, (row["seed"], row["steps"], row["ranks"])) for row in rows]
    return [measure.difference(float(row["score"]), exact[k]) for row, k in keys if k in exact]


def markdown(rows: Sequence[Row]) -> str:
    """Return a markdown table for each dataset."""
    parts = [_table(by_algorithm(rows, m.data), m) for m in MEASURES if by_algorithm(rows, m.data)]
    return "\n".join(parts)


def _table(groups: dict[str, list[Row]], measure: Measure) -> str:
    lines = [
        f"| {measure.title} | mean of seeds | min to max | against all-reduce "
        "| kB sent per step and rank | consensus distance | steps | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for algorithm, rows in groups.items():
        scores = [float(row["score"]) for row in rows]
        found = differences(rows, groups.get(BASELINE, []), measure)
        cells = [
            f"{algorithm}: `{rows[0]['options']}`",
            measure.show(statistics.fmean(scores)),
            f"{measure.show(min(scores))} to {measure.show(max(scores))}",
            f"{statistics.fmean(found):+.2f} {measure.unit}" if found else "",
            f"{statistics.fmean(float(row['step_bytes']) for row in rows) / 1e3:,.0f}",
            f"{max(float(row['consensus_distance']) for row in rows):.2g}",
            " ".join(sorted({row["steps"] for row in rows})),
            " ".join(sorted(row["seed"] for row in rows)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw each score relative to all-reduce, and the text's training loss over bytes sent."""
    measures = [measure for measure in MEASURES if by_algorithm(rows, measure.data)]
    names = sorted({row["algorithm"] for row in rows}, key=lambda name: (name != BASELINE, name))
    colors = {name: plt.get_cmap("tab20")(i % 20) for i, name in enumerate(names)}
    colors[BASELINE] = (0, 0, 0, 1)
    text = by_algorithm(rows, "text")
    width = len(measures) + bool(text)
    figure, panels = plt.subplots(
        1, width, figsize=(2 + 4 * width, 4.2), layout="constrained", squeeze=False
    )
    for axes, measure in zip(panels[0], measures, strict=False):
        draw_differences(axes, by_algorithm(rows, measure.data), measure, colors)
    if text:
        draw_losses(panels[0][-1], text, colors)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_losses(axes: plt.Axes, groups: dict[str, list[Row]], colors: dict[str, tuple]) -> None:
    for name, rows in groups.items():
        curves = [[float(loss) for loss in row["losses"].split()] for row in rows]
        means = [statistics.fmean(part) / math.log(2) for part in zip(*curves, strict=False)]
        total = statistics.fmean(int(row["steps"]) * float(row["step_bytes"]) for row in rows)
        sent = [total * (part + 1) / len(means) / 1e6 for part in range(len(means))]
        axes.plot(sent, means, color=colors[name], label=name, linewidth=1.5)
    axes.set(
        title="text, training", xlabel="MB sent per rank", ylabel="bits per byte, mean of ranks",
        xscale="log",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def draw_differences(
    axes: plt.Axes, groups: dict[str, list[Row]], measure: Measure, colors: dict[str, tuple]
) -> None:
    axes.axvspan(-measure.limit, measure.limit, color="0.93")
    axes.axvline(0, color="black", linewidth=1)
    names = [name for name in groups if name != BASELINE][::-1]
    reach = 1.5 * measure.limit
    for height, name in enumerate(names):
        found = differences(groups[name], groups.get(BASELINE, []), measure)
        reach = max(reach, *(1.1 * abs(value) for value in found), 0)
        axes.plot(found, [height] * len(found), "o", mfc="white", mec=colors[name], ms=6)
        if found:
            axes.plot(statistics.fmean(found), height, "o", color=colors[name], ms=8)
    sent = [statistics.fmean(float(r["step_bytes"]) for r in groups[name]) for name in names]
    labels = [f"{name}\n{size / 1e3:,.0f} kB" for name, size in zip(names, sent, strict=True)]
    axes.set_yticks(range(len(names)), labels, fontsize=8)
    axes.set(
        title=f"{measure.title}, against all-reduce", xlabel=f"{measure.unit}; hollow: one seed"
    )
    axes.set_xlim(-reach, reach)
    axes.grid(axis="x", alpha=0.3)
