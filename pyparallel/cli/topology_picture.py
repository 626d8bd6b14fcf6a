"""The picture of a topology: its graphs and mixing curve. Needs matplotlib."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from ..gossip.topology import Topology

mpl.use("Agg")

_SHOWN_RANKS = 64  # more would be illegible
_NUMBERED_RANKS = 32
_SHOWN_ROUNDS = 12


def draw(chosen: Topology, curve: np.ndarray, path: Path) -> None:
    """Draw the graphs of one period over each other, beside the mixing curve."""
    figure, (graph, mixing) = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    _draw_graphs(chosen, graph)
    mixing.semilogy(np.maximum(curve, 1e-16), ".-", lw=0.8)
    mixing.set_xlabel("rounds")
    mixing.set_ylabel("disagreement, relative to the first")
    mixing.grid(color="0.9")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_graphs(chosen: Topology, axes: Axes) -> None:
    shown, rounds = min(chosen.num_ranks, _SHOWN_RANKS), min(chosen.period, _SHOWN_ROUNDS)
    angles = np.pi * np.linspace(0.5, -1.5, shown, endpoint=False)
    places = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    colors = plt.colormaps["viridis"](np.linspace(0, 0.9, rounds))
    arrow = {"arrowstyle": "->", "alpha": 0.7, "lw": 0.8, "shrinkA": 7, "shrinkB": 7}
    for index in range(rounds):
        for rank in range(shown):
            for peer in chosen.out_peers(rank, index):
                if peer < shown:
                    style = {**arrow, "color": colors[index]}
                    axes.annotate("", places[peer], places[rank], arrowprops=style)
    numbered = shown <= _NUMBERED_RANKS
    axes.plot(*places.T, "o", color="white", mec="black", ms=13 if numbered else 5)
    for rank in range(shown if numbered else 0):
        axes.annotate(str(rank), places[rank], ha="center", va="center", fontsize=7)
    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.set_title(_title(chosen, shown, rounds), fontsize=8)


def _title(chosen: Topology, shown: int, rounds: int) -> str:
    which = "every round" if chosen.period == 1 else f"{chosen.period} rounds, dark to light"
    if rounds < chosen.period:
        which = f"the first {rounds} of {chosen.period:,} rounds, dark to light"
    part = "" if shown == chosen.num_ranks else f"\nranks below {shown} of {chosen.num_ranks:,}"
    return f"{chosen!r}: {which}{part}"
