"""The grid as text, and the picture."""

import importlib

import numpy as np
import pytest

from pyparallel.pipeline import GPipe, OneForwardOneBackward, ZeroBubble
from pyparallel.planning.pipelines import Costs, draw, simulate
from tests.cases import slow


def grid(actions, *options, **costs):
    done = simulate(actions, Costs(**costs))
    return draw(done.table, done.starts, done.ends, *options)


def test_the_grid_shows_actions_over_time():
    lines = grid(OneForwardOneBackward().actions(2, 2)).splitlines()
    assert lines == [
        "rank 0  0F0 0F1 .   .   0B0 --- .   0B1 ---",
        "rank 1  .   1F0 1B0 --- 1F1 1B1 --- .   .",
    ]


def test_a_split_backward_shows_both_parts():
    lines = grid(ZeroBubble().actions(2, 2)).splitlines()
    assert lines == ["rank 0  0F0 0F1 .   0I0 0W0 0I1 0W1", "rank 1  .   1F0 1I0 1F1 1I1 1W0 1W1"]


def test_time_is_to_scale():
    assert grid(GPipe().actions(1, 1), forward=0.5, backward=1.5) == "rank 0  0F0 0B0 --- ---"
    assert grid(GPipe().actions(1, 1), forward=[1.0], backward=[1.0]) == "rank 0  0F0 0B0"


def test_columns_and_ranks_are_limited():
    assert grid(GPipe().actions(1, 8), 3) == "rank 0  0F0 0F1 0F2"
    lines = grid(GPipe().actions(40, 1), 3).splitlines()
    assert len(lines) == 33
    assert lines[-1] == "and 8 more ranks"


def test_an_update_is_shown_if_it_takes_time():
    actions = GPipe().actions(1, 1)
    assert grid(actions, update=1) == "rank 0  0F0 0B0 --- 0U0"
    assert grid(actions, update=0.25) == "rank 0  0F0 0B0 --- ."


def test_actions_that_take_no_time_are_not_shown():
    assert grid(GPipe().actions(1, 1), forward=0, backward=0) == "rank 0"


@pytest.mark.parametrize("sizes", [(4, 6, 2), (1, 1, 1), slow((33, 34, 33))])
def test_the_picture_is_written(tmp_path, sizes):
    pytest.importorskip("matplotlib")
    picture = importlib.import_module("pyparallel.planning.pipelines.picture")
    runs = {
        "one": simulate(GPipe().actions(*sizes)),
        "other": simulate(ZeroBubble().actions(*sizes)),
    }
    picture.draw_timeline(runs, tmp_path / "timeline.png")
    pixels = importlib.import_module("matplotlib.pyplot").imread(tmp_path / "timeline.png")
    assert pixels.shape[0] > 200
    parts = (pixels[..., :3] * 255).round().astype(int)
    colors = set(np.unique(parts @ [1 << 16, 1 << 8, 1]).tolist())
    assert {0x7FB3D5, 0xF0B27A, 0xA9CFA0} <= colors  # forward, backward, weight part


def test_wide_bars_show_microbatch_numbers(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    picture = importlib.import_module("pyparallel.planning.pipelines.picture")
    monkeypatch.setattr(picture.plt, "close", lambda figure: None)
    run = simulate(GPipe().actions(1, 2, steps=2), Costs(forward=2, backward=4, update=0.001))
    picture.draw_timeline({"it": run}, tmp_path / "timeline.png")
    figure = picture.plt.gcf()
    monkeypatch.undo()
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == [*"01012323"]  # and no update's
    picture.plt.close(figure)
