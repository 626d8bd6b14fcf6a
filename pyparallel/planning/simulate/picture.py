"""The picture of simulated runs: seconds a step, consensus, losses. Needs matplotlib."""

from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

from .model import SimulatedRun

mpl.use("Agg")


def draw(runs: dict[str, SimulatedRun], path: Path) -> None:
    """Draw a step's seconds with their range, consensus over steps, and any losses over seconds."""
    panels = 2 + any(run.losses is not None for run in runs.values())
    figure, (bars, lines, *rest) = plt.subplots(
        1, panels, figsize=(5.5 * panels, 3.6), layout="constrained"
    )
    for row, (name, run) in enumerate(runs.items()):
        computed = run.seconds - run.waiting
        bars.barh(row, computed, color="C0", label=None if row else "computing")
        bars.barh(row, run.waiting, left=computed, color="C1", label=None if row else "waiting")
        bars.plot(run.range, [row, row], "k-", lw=1)
        lines.plot(run.steps, run.consensus_distances, label=name, lw=1)
        for losses in rest:
            losses.semilogy(run.steps * run.seconds / run.goodput, run.losses, label=name, lw=1)
    bars.set_yticks(range(len(runs)), list(runs), fontsize=7)
    bars.invert_yaxis()
    bars.set_xlabel("seconds a step; line: 10-90 %")
    bars.legend(fontsize=7)
    lines.set_xlabel("steps")
    lines.set_ylabel("consensus distance")
    for losses in rest:
        losses.set_xlabel("seconds")
        losses.set_ylabel("loss above its minimum")
    for panel in (lines, *rest):
        panel.grid(color="0.9")
        panel.legend(fontsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)
