"""Switch: the active compressor, nothing lost at switches, and resuming at any step."""

import copy
from itertools import product

import pytest
import torch

from benchmarks.theory.contraction import contraction
from pyparallel.compression import (
    AttachPoint,
    BufferLayout,
    Cast,
    ErrorFeedback,
    Int8,
    PermK,
    PerParameter,
    PowerSGD,
    RandomK,
    StateStore,
    Switch,
    Threshold,
    TopK,
    merge_states,
)
from tests.compression.means import CPU, gradient, layout_of, residual_of, send

NUMEL = 200
LAYOUT = layout_of(NUMEL)
ROWS = {
    "warm-up": Switch({0: ErrorFeedback(Cast()), 2: ErrorFeedback(TopK(0.1))}),
    "two that feed back": Switch({0: ErrorFeedback(TopK(0.05)), 2: ErrorFeedback(RandomK(0.1))}),
    "with draws": Switch({0: ErrorFeedback(RandomK(0.1)), 2: ErrorFeedback(PermK(num_ranks=3))}),
    "by parameter": Switch(
        {
            0: PerParameter({"*.bias": ErrorFeedback(TopK(0.2)), "*": ErrorFeedback(Int8())}),
            2: ErrorFeedback(TopK(0.1)),
            3: PerParameter({"*.bias": ErrorFeedback(Cast()), "*": ErrorFeedback(RandomK(0.3))}),
        }
    ),
    "factors": Switch({0: ErrorFeedback(TopK(0.1)), 2: ErrorFeedback(PowerSGD(1))}),
    "inside": ErrorFeedback(Switch({0: Cast(), 2: TopK(0.1)})),
    "inside, by parameter": PerParameter(
        {
            "*.bias": Switch({0: ErrorFeedback(Cast()), 3: ErrorFeedback(RandomK(0.5))}),
            "*": Switch({0: ErrorFeedback(TopK(0.1)), 2: ErrorFeedback(Int8())}),
        }
    ),
}


def test_each_compressor_is_active_from_its_step_on():
    compressor = Switch({3: Threshold(100.0), 0: Cast(), 1: Int8()})
    state, x = compressor.init(LAYOUT, CPU), gradient(0, 0, NUMEL)
    turns = [compressor.compress(x, state)[0].item() for _ in range(5)]
    assert turns == [0, 1, 1, 2, 2]


def test_only_the_active_compressor_has_state():
    compressor = Switch({0: ErrorFeedback(TopK(0.1)), 2: Cast(), 3: ErrorFeedback(Int8())})
    state = compressor.init(LAYOUT, CPU)
    held = []
    for step in range(5):
        compressor.compress(gradient(0, step, NUMEL), state)
        held.append([bool(inner.entries) for inner in state.inner])
    first, none, last = [True, False, False], [False] * 3, [False, False, True]
    assert held == [first, first, none, last, last]


def test_a_pending_residual_is_in_the_first_message_of_the_next(subtests):
    for dtype in [torch.float32, torch.bfloat16]:
        with subtests.test(str(dtype)):
            compressor = Switch({0: ErrorFeedback(TopK(0.05)), 3: Threshold(1e-30)})
            state = compressor.init(LAYOUT, CPU)
            sent, given = torch.zeros(NUMEL), torch.zeros(NUMEL)
            for step in range(4):
                x = gradient(0, step, NUMEL).to(dtype)
                given += x
                sent += send(compressor, x, state)
                if step == 2:
                    assert residual_of(state).any()
            torch.testing.assert_close(sent, given, rtol=0, atol=1e-5)
            assert not residual_of(state).any()


def test_resuming_at_any_step_is_bit_for_bit(subtests):
    for name, saved_at in product([name for name in ROWS if name != "with draws"], [1, 2, 3, 4]):
        with subtests.test(f"{name} {saved_at}"):
            compressor = ROWS[name]
            store = StateStore(compressor, 0, 1, LAYOUT)
            for step in range(6):
                if step == saved_at:
                    saved = copy.deepcopy(store.state_dict())
                    resumed = StateStore(compressor, 0, 1, LAYOUT)
                    resumed.load_state_dict(saved)
                sent = send(compressor, gradient(0, step, NUMEL), store.of(LAYOUT, CPU))
                if step >= saved_at:
                    again = send(compressor, gradient(0, step, NUMEL), resumed.of(LAYOUT, CPU))
                    assert torch.equal(sent, again), f"step {step}"
            assert_same_state(store.state_dict(), resumed.state_dict())


def assert_same_state(left, right):
    assert left["common"] == right["common"]
    assert left["parameters"].keys() == right["parameters"].keys()
    for name, tensors in left["parameters"].items():
        others = right["parameters"][name]
        assert tensors.keys() == others.keys()
        assert all(torch.equal(tensor, others[key]) for key, tensor in tensors.items())


def test_a_pending_residual_follows_its_parameter_into_another_buffer(subtests):
    for moved_at in [1, 2, 3]:
        with subtests.test(str(moved_at)):
            compressor = Switch({0: ErrorFeedback(TopK(0.05)), 2: Threshold(1e-30)})
            store = StateStore(compressor, 0, 1)
            turned = BufferLayout(LAYOUT.pieces[::-1])
            sent, given = torch.zeros(NUMEL), torch.zeros(NUMEL)
            for step in range(4):
                x = gradient(0, step, NUMEL)
                given += x
                if step < moved_at:
                    sent += send(compressor, x, store.of(LAYOUT, CPU))
                else:
                    back = send(compressor, torch.cat([x[-7:], x[:-7]]), store.of(turned, CPU))
                    sent += torch.cat([back[7:], back[:7]])
            torch.testing.assert_close(sent, given, rtol=0, atol=1e-5)


def test_a_residual_is_sent_when_its_parameter_returns_after_the_switch():
    compressor = Switch({0: ErrorFeedback(TopK(0.05)), 2: Threshold(1e-30)})
    store, others = StateStore(compressor, 0, 1), BufferLayout(LAYOUT.pieces[1:])
    skipped = NUMEL - others.numel
    sent, given = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for step in range(6):
        x = gradient(0, step, NUMEL)
        if 1 <= step < 4:
            given[skipped:] += x[skipped:]
            sent[skipped:] += send(compressor, x[skipped:], store.of(others, CPU))
        else:
            given += x
            sent += send(compressor, x, store.of(LAYOUT, CPU))
        if step >= 4:
            torch.testing.assert_close(sent, given, rtol=0, atol=1e-5)
    assert not store.state_dict()["parameters"][LAYOUT.names[0]]


def test_a_pending_residual_survives_another_number_of_ranks(subtests):
    for saved_at in [1, 2, 3]:
        with subtests.test(str(saved_at)):
            compressor = Switch({0: ErrorFeedback(TopK(0.05)), 2: ErrorFeedback(TopK(0.1))})
            stores = [StateStore(compressor, rank, 2, LAYOUT) for rank in range(2)]
            for step in range(saved_at):
                for rank, store in enumerate(stores):
                    send(compressor, gradient(rank, step, NUMEL), store.of(LAYOUT, CPU))
            states = [store.of(LAYOUT, CPU) for store in stores]
            expected = torch.stack([residual_of(state) for state in states]).mean(0)
            merged = StateStore(compressor, 0, 1, LAYOUT)
            merged.load_state_dict(merge_states([each.state_dict() for each in stores], 1))
            state = merged.of(LAYOUT, CPU)
            torch.testing.assert_close(residual_of(state), expected)
            assert state.step == saved_at


class RefusesNan(Threshold):
    def compress(self, x, state, residual=None):
        if x.isnan().any():
            raise ValueError("x must not be nan")
        return super().compress(x, state, residual)


def test_a_step_that_raises_does_not_count():
    compressor = Switch({0: ErrorFeedback(TopK(0.05)), 1: RefusesNan(1e-30)})
    state, x = compressor.init(LAYOUT, CPU), gradient(0, 0, NUMEL)
    sent = send(compressor, x, state)
    with pytest.raises(ValueError, match="x must not be nan"):
        compressor.compress(torch.full((NUMEL,), float("nan")), state)
    sent += send(compressor, x, state)
    torch.testing.assert_close(sent, 2 * x)


def test_a_skipped_switch_step_takes_effect():
    compressor = Switch({0: ErrorFeedback(TopK(0.05)), 1: Threshold(1e-30)})
    state, x = compressor.init(LAYOUT, CPU), gradient(0, 0, NUMEL)
    sent = send(compressor, x, state)
    state.step = 5
    torch.testing.assert_close(sent + send(compressor, x, state), 2 * x)


def test_properties_are_those_of_its_compressors():
    warm_up = ROWS["warm-up"]
    assert Switch({0: RandomK(0.1), 5: Int8(seed=0)}).unbiased
    assert not warm_up.unbiased
    assert not warm_up.fixed_length
    assert Switch({0: Cast()}).fixed_length
    assert warm_up.feeds_back
    with pytest.raises(ValueError, match="must not have error feedback already"):
        ErrorFeedback(warm_up)
    assert contraction(Switch({0: Cast(), 9: TopK(0.1)}), LAYOUT) == 0.1
    assert contraction(Switch({0: Cast(), 9: Threshold(1.0)}), LAYOUT) is None
    assert warm_up.error_at(AttachPoint.DDP) is None
    assert warm_up.error_at(AttachPoint.FSDP_GRADIENTS) is None
    for place in (AttachPoint.GOSSIP, AttachPoint.PIPELINE, AttachPoint.FSDP_PARAMETERS):
        assert "the same at all steps" in warm_up.error_at(place)


def test_invalid_schedules_of_compressors_are_rejected(subtests):
    for compressors, sentence in [
        ({}, "must have one for step 0"),
        ({5: Cast()}, r"must have one for step 0, got steps \[5\]"),
        ({0: Cast(), -1: Cast()}, "must map first steps to compressors"),
        ({0: Cast(), 1.5: Cast()}, "must map first steps to compressors"),
        ({0: None}, "must map first steps to compressors"),
    ]:
        with subtests.test(str(compressors)), pytest.raises(ValueError, match=sentence):
            Switch(compressors)
