"""Timelines as pictures. Needs matplotlib."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.patches import Patch

from ...pipeline.schedules.action import Kind
from .timeline import Timeline

mpl.use("Agg")

_MOST_RANKS = 64  # more would be illegible
_MOST_ACTIONS = 4_000
_MOST_LABELS = 400
_WIDTH = 12.0  # inches
_DIGIT = 0.055  # inches of a label
_SHOWN = {
    Kind.FORWARD: ("forward", "#7fb3d5"),
    Kind.BACKWARD: ("backward", "#f0b27a"),
    Kind.BACKWARD_INPUT: ("backward of inputs", "#e59891"),
    Kind.BACKWARD_WEIGHT: ("backward of weights", "#a9cfa0"),
    Kind.UPDATE: ("update", "#8e7cc3"),
    Kind.HEAD: ("head", "#d5c27f"),
    Kind.LEARN: ("backward", "#f0b27a"),
}
_ROUND_COLOR = "#555555"  # of a line below the bars


def draw_timeline(runs: Mapping[str, Timeline], path: Path) -> None:
    """Draw timelines, by title, below each other on one time scale: a bar for each action.

    Bars that are wide enough show the number of their microbatch. The suffix of the path is the
    format.
    """
    heights = [1.2 + 0.3 * min(run.table.num_ranks, _MOST_RANKS) for run in runs.values()]
    figure, rows = plt.subplots(
        len(runs), 1, figsize=(_WIDTH, sum(heights)), height_ratios=heights, layout="constrained",
        sharex=True, squeeze=False,
    )  # fmt: skip
    end = max(run.makespan for run in runs.values())
    for axes, (title, run) in zip(rows[:, 0], runs.items(), strict=True):
        _draw_run(axes, title, run, end)
    rows[-1, 0].set_xlabel("time")
    busy = {kind for run in runs.values() for kind in run.table.rows[run.ends > run.starts, 1]}
    shown = [_SHOWN[kind] for kind in Kind if kind in busy]
    bars = [Patch(color=color, label=name) for name, color in shown]
    if any(r.round_ends is not None and (r.round_ends > r.ends).any() for r in runs.values()):
        bars.append(Patch(color=_ROUND_COLOR, label="round with other replicas"))
    figure.legend(handles=bars, fontsize=8, ncols=len(bars), loc="outside upper right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_run(axes: Axes, title: str, run: Timeline, end: float) -> None:
    table = run.table
    shown = np.flatnonzero((table.ranks < _MOST_RANKS) & (run.ends > run.starts))
    shown = np.sort(shown[np.argsort(run.starts[shown], kind="stable")][:_MOST_ACTIONS])
    for kind in Kind:
        rows = shown[table.rows[shown, 1] == kind]
        if len(rows):
            _add_bars(axes, run, rows, kind)
    if run.round_ends is not None:
        begins = (table.ranks < _MOST_RANKS) & (run.round_ends > run.ends)
        rows = np.flatnonzero(begins)[:_MOST_ACTIONS]
        heights = table.ranks[rows] + 0.45
        axes.hlines(heights, run.ends[rows], run.round_ends[rows], _ROUND_COLOR, linewidth=2)
    if len(shown) <= _MOST_LABELS:
        _add_labels(axes, run, shown, end / _WIDTH)
    ranks = min(table.num_ranks, _MOST_RANKS)
    axes.set_xlim(0, end)
    axes.set_ylim(ranks - 0.4, -0.6)
    axes.set_yticks(range(0, ranks, max(1, ranks // 16)))
    axes.set_ylabel("rank")
    axes.spines[:].set_visible(False)
    axes.set_title(_title(title, run, len(shown)), fontsize=9, loc="left", wrap=True)


def _add_bars(axes: Axes, run: Timeline, rows: np.ndarray, kind: Kind) -> None:
    """Add a bar for each row; the later stages of a rank are paler."""
    begins, ends, ranks = run.starts[rows], run.ends[rows], run.table.ranks[rows]
    left, right = np.stack([begins, begins], axis=1), np.stack([ends, ends], axis=1)
    across = np.stack([ranks - 0.4, ranks + 0.4], axis=1)
    across = np.concatenate([across, across[:, ::-1]], axis=1)
    corners = np.stack([np.concatenate([left, right], axis=1), across], axis=2)
    colors = np.tile(to_rgba(_SHOWN[kind][1]), (len(rows), 1))
    # stages // num_ranks: the index of the stage among those of its rank.
    stages = run.table.rows[rows, 0]
    colors[:, 3] = 0.6 ** (stages // run.table.num_ranks)
    bars = PolyCollection(list(corners), facecolors=colors, edgecolors="white", linewidths=0.4)
    axes.add_collection(bars)


def _add_labels(axes: Axes, run: Timeline, rows: np.ndarray, inch: float) -> None:
    """Add microbatch numbers where they fit; ``inch`` is the time that an inch spans."""
    numbers = run.table.rows[rows, 2].tolist()
    for row, label in zip(rows.tolist(), map(str, numbers), strict=True):
        if run.ends[row] - run.starts[row] >= _DIGIT * len(label) * inch:
            middle = (run.starts[row] + run.ends[row]) / 2
            axes.text(middle, run.table.ranks[row], label, ha="center", va="center", fontsize=6)


def _title(title: str, run: Timeline, shown: int) -> str:
    busy = int((run.ends > run.starts).sum())
    part = "" if shown == busy else f"; {shown:,} of {busy:,} actions shown"
    return f"{title}: {run.bubble:.1%} of the time idle{part}"
