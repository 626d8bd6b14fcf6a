"""The picture of the first page: one gain in each panel, against the best peer, from the rows."""

import hashlib
import json
from pathlib import Path

import matplotlib as mpl
import rows
import tables

from benchmarks.harness.pictures import OURS, PEER, STYLE, bars
from benchmarks.subnets.picture import draw_mean
from benchmarks.subnets.table import by_method, read_curve

mpl.use("Agg")
from matplotlib import pyplot as plt

PATH = Path(__file__).resolve().parents[1] / "images" / "gains.png"
GOSSIP, PIPELINE = "gossip-amd-epyc-2-threads", "pipeline-amd-epyc-2-threads"
SUBNETS = "subnets-amd-epyc-2-threads"
# The rows of each panel.
LINKS = {"part": "steps", "case": "1000 Mbit/s", "compute": "real, 1 thread a rank"}
THROUGHPUT = {"part": "throughput", "case": "M = 8"}
DIGITS = {"task": "digits"}
DRAWN = {GOSSIP: LINKS, PIPELINE: THROUGHPUT, SUBNETS: DIGITS}


def draw_links(axes: plt.Axes) -> str:
    """Draw the time of a step of gossip and of DDP."""
    shown = {
        "DDP": "DDP",
        "DDP, bf16 hook": "DDP, bf16 hook",
        "SGP": "SGP",
        "SGP, overlap=1": "SGP, overlap=1",
    }
    times = [rows.value(GOSSIP, "median_ms", method=method, **LINKS) for method in shown]
    bars(axes, list(shown.values()), times, [PEER, PEER, OURS, OURS], "{:.0f} ms")
    return f"Gossip at 1 Gbit/s: {times[-1]:.0f} ms per step, DDP {times[1]:.0f} to {times[0]:.0f}"


def draw_pipelines(axes: plt.Axes) -> str:
    """Draw how much of the limit pipelines reach."""
    systems = ["torch 1F1B", "torch InterleavedZeroBubble", "torch ZBVZeroBubble", "PipeOptim"]
    shares = [100 * rows.value(PIPELINE, "of_limit", system=each, **THROUGHPUT) for each in systems]
    bars(axes, systems, shares, [PEER, PEER, PEER, OURS], "{:.0f} %")
    best = 100 * tables.fastest_of_torch("of_limit", PIPELINE, **THROUGHPUT)
    return f"Pipelines: {shares[-1]:.0f} % of full speed, torch's best {best:.0f} %"


def draw_subnets(axes: plt.Axes) -> str:
    """Draw the accuracy over seconds."""
    found = rows.rows(SUBNETS, **DIGITS)
    for name, group in by_method(found, "digits").items():
        curves = [read_curve(row) for row in group]
        draw_mean(axes, name, [(curve.seconds, curve.scores) for curve in curves])
    axes.set(xlim=(0, 20), ylim=(0.92, 1.0))
    axes.set_xticks([0, 5, 10, 15, 20], ["0 s", "5 s", "10 s", "15 s", "20 s"])
    axes.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1, decimals=0))
    axes.set_ylabel("test accuracy", size=12)
    axes.grid()
    axes.legend(loc="lower right", ncols=2)
    ours, theirs = (tables.to_target(found, name)[0] for name in ("SubnetTrainer", "DDP"))
    target = rows.mean(SUBNETS, "score", method="DDP", **DIGITS) - 0.01
    return f"Subnets at 100 Mbit/s: {target:.0%} in {ours:.1f} s, DDP in {theirs:.1f} s"


def digest() -> str:
    """Return a digest of the rows that the picture shows; the picture holds it as ``Rows``."""
    found = [rows.rows(name, **where) for name, where in DRAWN.items()]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def draw(path: Path = PATH) -> None:
    """Draw the picture; the title of a panel is its answer."""
    style = {**STYLE, "figure.dpi": 100, "font.size": 13, "figure.titlesize": 13}
    style |= {"ytick.labelsize": 12, "xtick.labelsize": 11}
    with mpl.rc_context(style):
        figure = plt.figure(figsize=(12, 4.2), layout="constrained")
        left, right = figure.subfigures(1, 2)
        upper, lower = left.subfigures(2, 1)
        panels = {draw_links: upper, draw_pipelines: lower, draw_subnets: right}
        for draw_panel, panel in panels.items():
            axes = panel.subplots()
            panel.suptitle(draw_panel(axes), x=0.01, ha="left", weight="bold")
            if draw_panel is not draw_subnets:
                axes.spines.bottom.set_visible(False)
                axes.set_xticks([])
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None, "Rows": digest()})
        plt.close(figure)
