import pytest
import torch

from pyparallel.compression import BufferLayout, CompressorState, Piece

LAYOUT = BufferLayout((Piece("a", (2, 2)), Piece("b", (3,))))


def make_state(layout=LAYOUT):
    inner = CompressorState(
        layout,
        pieces={name: {"factor": torch.zeros(2)} for name in layout.names},
        common={"rate": torch.zeros(())},
    )
    return CompressorState(layout, entries={"residual": torch.zeros(layout.numel)}, inner=[inner])


def test_parameter_state_is_by_name():
    state = make_state()
    state.entries["residual"].copy_(torch.arange(7.0))
    state.inner[0].pieces["b"]["factor"].fill_(5)
    saved = state.parameter_state()
    assert saved["a"]["residual"].tolist() == [[0, 1], [2, 3]]
    assert saved["b"]["residual"].tolist() == [4, 5, 6]
    assert saved["b"]["0.factor"].tolist() == [5, 5]


def test_a_state_is_loaded_into_another_layout():
    state = make_state()
    state.entries["residual"].copy_(torch.arange(7.0))
    state.step, state.inner[0].step = 3, 4
    state.inner[0].common["rate"].fill_(0.5)
    state.inner[0].pieces["a"]["factor"].fill_(2)

    other = make_state(BufferLayout(LAYOUT.pieces[::-1]))
    other.load_state(state.parameter_state(), state.common_state())
    assert other.entries["residual"].tolist() == [4, 5, 6, 0, 1, 2, 3]
    assert (other.step, other.inner[0].step) == (3, 4)
    assert other.inner[0].common["rate"] == 0.5
    assert other.inner[0].pieces["a"]["factor"].tolist() == [2, 2]


def test_missing_entries_keep_their_values():
    state = make_state()
    state.entries["residual"].fill_(1)
    state.load_state({"a": {"residual": torch.zeros(2, 2)}}, {})
    assert state.entries["residual"].tolist() == [0] * 4 + [1] * 3


def test_another_shape_is_rejected():
    with pytest.raises(ValueError, match=r"got a residual of shape \[4\] for the parameter a"):
        make_state().load_state({"a": {"residual": torch.zeros(4)}}, {})


def test_seeds_differ_by_rank_and_buffer_unless_shared():
    other = CompressorState(BufferLayout.flat(7))
    assert CompressorState(LAYOUT).seed(1) != other.seed(1)
    assert CompressorState(LAYOUT, rank=1).seed(1) != CompressorState(LAYOUT).seed(1)
    assert CompressorState(LAYOUT).seed(2) != CompressorState(LAYOUT).seed(1)
    assert CompressorState(LAYOUT, rank=1).seed(1, shared=True) == CompressorState(LAYOUT).seed(
        1, shared=True
    )
    assert CompressorState(LAYOUT).seed(1) == CompressorState(LAYOUT).seed(1)
