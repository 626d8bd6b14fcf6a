"""The picture of simulated runs: seconds a step and consensus distances. Needs matplotlib."""

from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

from ..simulate import SimulatedRun

mpl.use("Agg")


def draw(runs: dict[str, SimulatedRun], path: Path) -> None:
    """Draw a step's seconds with their range, beside the consensus distance over steps."""
    figure, (bars, lines) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for row, (name, run) in enumerate(runs.items()):
        computed = run.seconds - run.waiting
        bars.barh(row, computed, color="C0", label=None if row else "computing")
        bars.barh(row, run.waiting, left=computed, color="C1", label=None if row else "waiting")
        bars.plot(run.range, [row, row], "k-", lw=1)
        lines.plot(run.steps, run.consensus_distances, label=name, lw=1)
    bars.set_yticks(range(len(runs)), list(runs), fontsize=7)
    bars.invert_yaxis()
    bars.set_xlabel("seconds a step; line: 10-90 %")
    bars.legend(fontsize=7)
    lines.set_xlabel("steps")
    lines.set_ylabel("consensus distance")
    lines.grid(color="0.9")
    lines.legend(fontsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)
