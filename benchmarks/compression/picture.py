"""The picture of a results file: time per step on each link, and host time of compressors.

``python -m benchmarks.compression.picture benchmarks/results/compression-<machine>.csv`` redraws
it.
"""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.compression.cost import BACKWARD
from benchmarks.compression.systems import ALONE
from pyparallel.recommend import DENSE

Row = dict[str, str]
GOAL = 0.1  # of the backward


def bars(axes: plt.Axes, names: Sequence[str], values: Sequence[float], show: str) -> None:
    """Draw horizontal bars, the first on top, with their values."""
    places = range(len(names))[::-1]
    colors = ["C1" if name.startswith("torch") or name == DENSE.name else "C0" for name in names]
    axes.barh(places, values, color=colors)
    for place, value in zip(places, values, strict=True):
        axes.annotate(f" {value:{show}}", (value, place), va="center", fontsize=7)
    axes.set_yticks(places, names, fontsize=8)
    axes.margins(x=0.15)


def draw_link(axes: plt.Axes, rows: Sequence[Row]) -> None:
    """Draw time per step, the fastest on top, without systems that do not run."""
    ran = sorted(
        (row for row in rows if row["median_ms"] and row["system"] != ALONE),
        key=lambda row: float(row["median_ms"]),
    )
    bars(axes, [row["system"] for row in ran], [float(row["median_ms"]) for row in ran], ".0f")
    (compute,) = [float(row["median_ms"]) for row in rows if row["system"] == ALONE]
    axes.axvline(compute, color="black", linestyle=":", lw=1.2)
    axes.annotate(ALONE, (compute, -0.9), fontsize=7)
    axes.set_xlabel("ms per step, slowest rank")
    axes.set_title(f"{rows[0]['case']}, {int(rows[0]['numel']) / 1e6:.1f} M parameters", fontsize=9)


def draw_cost(axes: plt.Axes, rows: Sequence[Row]) -> None:
    """Draw fractions of the backward pass, the cheapest on top."""
    compressors = sorted(
        (row for row in rows if row["system"] != BACKWARD), key=lambda row: float(row["ratio"])
    )
    shares = [100 * float(row["ratio"]) for row in compressors]
    bars(axes, [row["system"] for row in compressors], shares, ".1f")
    axes.axvline(100 * GOAL, color="black", linestyle=":", lw=1.2)
    axes.set_xlabel("encoding and decoding, % of a backward pass")
    size = f"{int(rows[0]['numel']) / 1e6:.0f} M parameters, {rows[0]['case']}"
    axes.set_title(f"the processor's share, {size}", fontsize=9)


def draw_power_sgd(axes: plt.Axes, rows: Sequence[Row]) -> None:
    """Draw ours beside torch's hook."""
    bars(axes, [row["system"] for row in rows], [float(row["median_ms"]) for row in rows], ".1f")
    axes.set_xlabel("ms per step beside communication")
    axes.set_title(f"PowerSGD, {int(rows[0]['numel']) / 1e6:.1f} M parameters", fontsize=9)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture of all parts in the file."""
    linked = [row for row in rows if row["part"] == "links"]
    cases = list(dict.fromkeys(row["case"] for row in linked))
    costs, power_sgd = ([r for r in rows if r["part"] == part] for part in ("cost", "power_sgd"))
    panels = len(cases) + bool(costs) + bool(power_sgd)
    figure, axes = plt.subplots(
        1, panels, figsize=(5 * panels, 6), layout="constrained", squeeze=False
    )
    free = list(axes[0])
    for case in cases:
        draw_link(free.pop(0), [row for row in linked if row["case"] == case])
    if costs:
        draw_cost(free.pop(0), costs)
    if power_sgd:
        draw_power_sgd(free.pop(0), power_sgd)
    figure.suptitle(f"{path.stem}: 2 gloo processes, one thread each", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(path: Path) -> None:
    with path.open(newline="") as file:
        draw(list(csv.DictReader(file)), path.with_suffix(".png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
