import copy

import pytest
import torch

from pyparallel.compression import (
    BufferLayout,
    ErrorFeedback,
    Int8,
    Learned,
    Piece,
    Switch,
    TopK,
    merge_states,
)
from pyparallel.compression.state_store import StateStore
from pyparallel.training import seal

CPU = torch.device("cpu")
PIECES = {name: Piece(name, shape) for name, shape in [("a", (4, 3)), ("b", (7,)), ("c", (2,))]}
COMPRESSOR = ErrorFeedback(TopK(0.2))


def layout(names):
    return BufferLayout(tuple(PIECES[name] for name in names))


def compress(store, names, seed):
    x = torch.randn(layout(names).numel, generator=torch.Generator().manual_seed(seed))
    state = store.of(layout(names), CPU)
    return store.compressor.compress(x, state)


def residuals(store):
    parameters = store.state_dict()["parameters"]
    return {
        name: tensor.clone()
        for name, tensors in parameters.items()
        for key, tensor in tensors.items()
        if key.rpartition(".")[2] == "residual"
    }


def test_a_residual_follows_its_parameter_into_other_buffers():
    store = StateStore(COMPRESSOR, 0, 1)
    compress(store, "abc", 0)
    before = residuals(store)
    store.of(layout("cb"), CPU)
    store.of(layout("a"), CPU)
    after = residuals(store)
    assert before.keys() == after.keys()
    for name, residual in before.items():
        assert residual.abs().sum() > 0
        torch.testing.assert_close(after[name], residual, rtol=0, atol=0)


def test_a_residual_outside_of_a_buffer_keeps_no_other_in_memory():
    store = StateStore(COMPRESSOR, 0, 1)
    compress(store, "abc", 0)
    before = residuals(store)
    compress(store, "bc", 1)
    kept = store.state_dict()["parameters"]["a"]["residual"]
    assert torch.equal(kept, before["a"])
    assert kept.untyped_storage().nbytes() == 4 * kept.numel()


def test_a_buffer_is_at_the_last_step_of_its_parameters():
    """Else a warm-up begins again when a parameter returns that had no gradient for a while."""
    store = StateStore(COMPRESSOR, 0, 1)
    compress(store, "abc", 0)
    for seed in range(3):
        compress(store, "bc", seed)
    state = store.of(layout("abc"), CPU)
    assert (state.step, state.inner[0].step) == (0, 4)


def test_the_same_buffer_keeps_its_state():
    store = StateStore(COMPRESSOR, 0, 1)
    assert store.of(layout("ab"), CPU) is store.of(layout("ab"), CPU)


def test_another_run_resumes_bit_for_bit_in_other_buffers():
    store, other = StateStore(COMPRESSOR, 0, 1), StateStore(COMPRESSOR, 0, 1)
    compress(store, "ab", 0)
    compress(store, "c", 1)
    other.load_state_dict(store.state_dict())
    for names in ("ab", "c"):
        for left, right in zip(compress(store, names, 2), compress(other, names, 2), strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=0)
        assert (
            store.of(layout(names), CPU).common_state()
            == other.of(layout(names), CPU).common_state()
        )


def test_a_loaded_but_unused_state_is_saved():
    store, other = StateStore(COMPRESSOR, 0, 1), StateStore(COMPRESSOR, 0, 1)
    compress(store, "abc", 0)
    other.load_state_dict(store.state_dict())
    assert residuals(other).keys() == residuals(store).keys()
    assert other.norm("residual") == store.norm("residual") > 0


def test_missing_entries_keep_their_values():
    state = COMPRESSOR.init(layout("ab"), CPU)
    state.entries["residual"].fill_(1)
    state.load_state({"a": {"residual": torch.zeros(4, 3)}}, {})
    assert state.entries["residual"].tolist() == [0] * 12 + [1] * 7


def test_loading_copies():
    store, other = StateStore(COMPRESSOR, 0, 1), StateStore(COMPRESSOR, 0, 1)
    compress(store, "abc", 0)
    other.load_state_dict(store.state_dict())
    before = residuals(other)
    compress(store, "abc", 1)
    for name, residual in residuals(other).items():
        torch.testing.assert_close(residual, before[name], rtol=0, atol=0)


def test_the_mean_residual_survives_another_number_of_ranks():
    states = []
    for rank in range(3):
        store = StateStore(COMPRESSOR, rank, 3)
        compress(store, "abc", rank)
        states.append(store.state_dict())
    merged = merge_states(states, 5)
    mean = sum(state["parameters"]["a"]["residual"] for state in states) / 3
    torch.testing.assert_close(merged["parameters"]["a"]["residual"], mean)
    store = StateStore(COMPRESSOR, 0, 5)
    store.load_state_dict(merged)
    compress(store, "abc", 0)


def test_a_state_of_another_run_is_rejected():
    store = StateStore(COMPRESSOR, 0, 2, layout("ab"))
    compress(store, "ab", 0)
    state = store.state_dict()
    with pytest.raises(
        ValueError, match=r"must have been saved with compressor Int8.*got ErrorFeedback"
    ):
        StateStore(Int8(), 0, 2).load_state_dict(state)
    with pytest.raises(
        ValueError, match="must have been saved with num_ranks 3, got 2; convert it by merge_states"
    ):
        StateStore(COMPRESSOR, 0, 3).load_state_dict(state)
    with pytest.raises(ValueError, match="must have been saved with rank 1, got 0"):
        StateStore(COMPRESSOR, 1, 2).load_state_dict(state)
    with pytest.raises(ValueError, match=r"parameters that it does not have: a$"):
        StateStore(COMPRESSOR, 0, 2, layout("bc")).load_state_dict(state)
    other = StateStore(COMPRESSOR, 0, 2)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"residual of shape \[4, 3\] for the parameter a"):
        other.of(BufferLayout((Piece("a", (12,)),)), CPU)
    with pytest.raises(ValueError, match="must be the states of all 2 ranks, got 1"):
        merge_states([state], 3)
    with pytest.raises(
        ValueError, match="must be the states of all ranks of the old run, got none"
    ):
        merge_states([], 3)
    for changed in ({"compressor": "Int8()"}, {"parameters": {}}):
        other_state = seal(state | changed)
        with pytest.raises(ValueError, match=r"one compressor and model.*\[0\] and states\[1\]"):
            merge_states([state, other_state], 3)


def test_invalid_states_are_rejected(subtests):
    for garbage in [None, 3, seal({}), seal({"compressor": repr(COMPRESSOR)})]:
        raises = pytest.raises(ValueError, match=r"must be a result of state_dict\(\), with comm")
        with subtests.test(str(garbage)), raises:
            StateStore(COMPRESSOR, 0, 1).load_state_dict(garbage)


def test_a_buffer_that_begins_with_a_new_parameter_resumes_at_the_step_of_the_others():
    """As with unfrozen parameters: a switch must not restart and lose its residual."""
    store = StateStore(Switch({0: Int8(), 2: ErrorFeedback(TopK(0.2))}), 0, 1)
    for seed in range(3):
        compress(store, "bc", seed)
    before = residuals(store)
    state = store.of(layout("abc"), CPU)
    assert state.step == 3
    for name, residual in before.items():
        assert residual.abs().sum() > 0
        torch.testing.assert_close(residuals(store)[name], residual, rtol=0, atol=0)


def test_common_state_is_copied_and_checked():
    compressor = Learned(0.5, dense_steps=0)
    store, other = StateStore(compressor, 0, 1), StateStore(compressor, 0, 1)
    weights = store.of(layout("ab"), CPU).common["weights"]
    other.load_state_dict(store.state_dict())
    before = weights.clone()
    weights.zero_()
    torch.testing.assert_close(other.of(layout("ab"), CPU).common["weights"], before)
    saved = copy.deepcopy(store.state_dict())
    for name in "ab":
        saved["common"][name]["weights"] = torch.zeros(1)
    with pytest.raises(ValueError, match="the state was changed"):
        other.load_state_dict(saved)
    other.load_state_dict(seal(saved))
    with pytest.raises(ValueError, match=r"a weights of shape \[1\] for all parameters, expected"):
        other.of(layout("ab"), CPU)
