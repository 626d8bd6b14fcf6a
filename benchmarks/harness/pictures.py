"""Pictures of rows: what all of them share.

Each ``benchmarks/<folder>/picture.py`` has a function for each picture, in ``PICTURES`` by name. It
takes the rows of a file and returns a figure, or None where the file lacks the rows it shows
(``shows``). ``python -m benchmarks.<folder>.picture FILE.csv`` draws all of them, into the
folder FILE.
"""

import argparse
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

from benchmarks.harness.rows import Row, read_rows
from benchmarks.harness.tables import of, where

mpl.use("Agg")
from matplotlib import pyplot as plt

Picture = Callable[..., "plt.Figure | None"]

# Okabe and Ito's colors, which the color-blind can tell apart.
BLACK, ORANGE, SKY, GREEN = "black", "#e69f00", "#56b4e9", "#009e73"
BLUE, RED, PURPLE, GRAY = "#0072b2", "#d55e00", "#cc79a7", "0.62"
OURS, PEER = BLUE, GRAY
WIDTH = 8.0  # inches, 960 pixels

BEHIND_TEXT = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.5}
STYLE = {
    "figure.dpi": 120,
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.labelsize": 11,
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.labelsize": 11,
    "figure.titlesize": 13,
    "figure.titleweight": "bold",
    "grid.color": "0.9",
    "legend.fontsize": 10,
    "legend.frameon": False,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
}


def shows(select: Callable[[Sequence[Row]], Sequence[Row]]) -> Callable[[Picture], Picture]:
    """Give a picture the rows that a function selects; where there are none, it is None."""

    def decorate(draw: Picture) -> Picture:
        @functools.wraps(draw)
        def picture(rows: Sequence[Row], *arguments: object) -> "plt.Figure | None":
            chosen = select(rows)
            return draw(chosen, *arguments) if chosen else None

        return picture

    return decorate


def shows_part(name: str) -> Callable[[Picture], Picture]:
    return shows(lambda rows: where(rows, part=name))


def panels(title: str, count: int, height: float, **options: object) -> tuple:
    figure, axes = plt.subplots(
        1, count, figsize=(WIDTH, height), layout="constrained", squeeze=False, **options
    )
    figure.suptitle(title, x=0.01, ha="left")
    return figure, list(axes[0])


def legend(figure: plt.Figure, axes: plt.Axes, columns: int) -> None:
    """Add the legend of one of the axes below all of them."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns)


def bars(
    axes: plt.Axes, names: Sequence[str], values: Sequence[float], colors: Sequence[str], show: str
) -> None:
    """Draw horizontal bars, the first on top, with their values at their ends."""
    axes.barh(range(len(names)), values, color=colors)
    for place, value in enumerate(values):
        if not math.isnan(value):
            end = {"xy": (max(value, 0), place), "xytext": (4, 0), "textcoords": "offset points"}
            size = mpl.rcParams["font.size"] - 2
            axes.annotate(show.format(value), **end, va="center", size=size, bbox=BEHIND_TEXT)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.17)


def gray_if_torch(system: str) -> str:
    return PEER if system.startswith("torch") else OURS


def bars_by_case(
    rows: Sequence[Row], title: str, height: float, field: str, show: str,
    color: Callable[[str], str] = gray_if_torch, column: str = "system", scale: float = 1,
) -> tuple:  # fmt: skip
    """Return a figure with bars of all systems in a panel for each case, and its axes."""
    cases, names = of(rows, "case"), of(rows, column)
    figure, axes = panels(title, len(cases), height, sharey=True)
    for own, case in zip(axes, cases, strict=True):
        found = {row[column]: scale * float(row[field]) for row in where(rows, case=case)}
        values = [found.get(name, math.nan) for name in names]
        bars(own, names, values, list(map(color, names)), show)
        own.set_title(case)
    return figure, axes


def dots(
    axes: plt.Axes, found: Mapping[str, Sequence[float]], limit: float, reach: float | None = None
) -> None:
    """Draw differences from a baseline: a hollow dot for each seed, a full one for their mean.

    Differences within the limit are on gray; a mean beyond the reach, which would squeeze all
    others, is a number at the edge.
    """
    axes.axvspan(-limit, limit, color="0.93")
    axes.axvline(0, color=BLACK, linewidth=1)
    for place, values in enumerate(found.values()):
        if not values:
            continue
        average = statistics.fmean(values)
        if reach and not abs(average) <= reach:  # nan is not, either
            side = math.copysign(0.98, average) * reach
            ha = "left" if side < 0 else "right"
            axes.annotate(f"{average:+.0f}", (side, place), ha=ha, va="center", color=RED)
            continue
        if len(values) > 1:
            axes.plot(values, [place] * len(values), "o", mfc="white", mec=BLUE, ms=6)
        axes.plot(average, place, "o", color=BLUE, ms=8)
    if reach:
        axes.set_xlim(-reach, reach)
    axes.set_yticks(range(len(found)), list(found))
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.grid(axis="x")


def label_ends(axes: plt.Axes, ends: Mapping[str, tuple[float, float, str]], gap: float) -> None:
    """Write names right of the ends of lines, at least a gap apart; an end is x, y and color."""
    height = -math.inf
    for name, (x, y, color) in sorted(ends.items(), key=lambda item: item[1][1]):
        height = max(y, height + gap)
        axes.annotate(f"  {name}", (x, height), color=color, va="center", annotation_clip=False)


def save(picture: Picture, rows: Sequence[Row], path: Path) -> str | None:
    """Draw a picture; return its title, or None where there are no rows for it."""
    with mpl.rc_context(STYLE):
        figure = picture(rows)
        if figure is None:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None})
        plt.close(figure)
    return figure.get_suptitle()


def drawn(pictures: Mapping[str, Picture], rows: Sequence[Row], folder: Path) -> list[str]:
    """Draw the pictures that there are rows for into a folder; return their names."""
    return [name for name, each in pictures.items() if save(each, rows, folder / f"{name}.png")]


def main(pictures: Mapping[str, Picture]) -> None:
    """Draw the pictures of a file into a folder beside it, as the program of a module."""
    parser = argparse.ArgumentParser(description="Draw a file's pictures into a folder beside it.")
    parser.add_argument("file", type=Path)
    path = parser.parse_args().file
    folder = path.with_suffix("")
    print(*(folder / f"{name}.png" for name in drawn(pictures, read_rows(path), folder)), sep="\n")
