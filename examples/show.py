"""What the examples print, draw and save."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

mpl.use("Agg")
COLORS = {"forward": "tab:blue", "backward": "tab:orange", "update": "tab:purple"}


def print_table(title: str, *columns: Sequence[str]) -> None:
    """Print columns, each with its heading first; a short one ends in empty cells."""
    width, *other_widths = [max(map(len, column)) for column in columns]
    print(f"\n{title}\n")
    for first, *others in zip_longest(*columns, fillvalue=""):
        cells = [first.ljust(width)]
        cells += [cell.rjust(each) for cell, each in zip(others, other_widths, strict=True)]
        print("   ".join(cells))


def print_next(note: str, picture: Path, load: str, command: str) -> None:
    """Print what the table means, where the picture is, what to try, and how to load the model."""
    print(f"\n{note}\n\nPicture:  {picture}\nTry next: {command}")
    print(f"Load the model, in Python started in this folder:\n  {load}\n")


def save_model(state: Mapping[str, Any], path: Path, built_by: str, file: str = "models") -> str:
    """Save weights as .pt; return the line of Python that loads them into the plain module."""
    path = path.with_suffix(".pt")
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.cpu() for name, tensor in state.items()}
    torch.save(weights, path)
    function = built_by.partition("(")[0]
    return (
        f"import torch; from examples.{file} import {function}; "
        f'model = {built_by}; model.load_state_dict(torch.load("{path}"))'
    )


def draw(
    path: Path,
    question: str,
    curves: Mapping[str, Iterable[tuple[float, float]]],
    xlabel: str,
    ylabel: str,
    spans: Sequence[Sequence[Any]] = (),
    **limits: Any,
) -> Path:
    """Draw curves as .png, the first one gray, and below them the spans of each rank."""
    heights = [4, 1 + 0.3 * len(spans)] if spans else [4]
    figure, rows = plt.subplots(
        len(heights),
        1,
        figsize=(7, sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    axes = rows[0][0]
    for (name, points), color in zip(curves.items(), ("0.55", "tab:blue"), strict=True):
        axes.plot(*zip(*points, strict=True), color=color, label=name)
    axes.set(title=question, xlabel=xlabel, ylabel=ylabel, **limits)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    if spans:
        draw_spans(rows[1][0], spans)

    path = path.with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def draw_spans(axes: Axes, spans: Sequence[Sequence[Any]]) -> None:
    """Draw a bar for each span of a rank, by time."""
    kinds = {"FORWARD": "forward", "HEAD": "forward", "UPDATE": "update"}
    start = min(span.begin for rank in spans for span in rank)
    for rank, row in enumerate(spans):
        for span in row:
            kind = kinds.get(span.action.kind.name, "backward")
            bar = 1000 * (span.begin - start), 1000 * (span.end - span.begin)
            axes.broken_barh([bar], (rank - 0.4, 0.8), color=COLORS[kind], linewidth=0)
    for name, color in COLORS.items():
        axes.plot([], [], color=color, linewidth=5, label=name)
    axes.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 0.95), fontsize=8)
    axes.set(xlabel="ms", ylabel="rank", yticks=range(len(spans)), ylim=(len(spans) - 0.5, -0.5))
    axes.set_title("The last two steps (white: waiting)", loc="left", fontsize=9)


def smooth(values: Sequence[float], window: int = 20) -> list[tuple[int, float]]:
    """Return the step and the mean of that many losses up to it."""
    window = min(window, len(values))
    ends = range(window, len(values) + 1)
    return [(end, sum(values[end - window : end]) / window) for end in ends]
