"""The schedule: a value, and the order of every rank's actions."""

import pytest

from pyparallel import pipeline
from pyparallel.pipeline import (
    Farthest,
    Interlocking,
    Kind,
    LinearHead,
    Mean,
    OneForwardOneBackward,
    Sum,
)
from pyparallel.planning.pipelines import simulate


def test_simulate_refuses_the_kinds_of_interlocking():
    with pytest.raises(ValueError, match=r"actions must be of the kinds F, B, I, W and U, got 0H0"):
        simulate(Interlocking(2, LinearHead(2)).actions(3, 2))


def test_actions_in_order():
    actions = Interlocking(2, LinearHead(2)).actions(3, 2)
    assert [" ".join(map(str, rank)) for rank in actions] == [
        "0F0 0H0 0F1 0H1 0L0 0L1 0U1",
        "1F0 1H0 1F1 1H1 1L0 1L1 1U1",
        "2F0 2L0 2F1 2L1 2U1",
    ]


def test_the_whole_window_is_one_forward_one_backward():
    ours = Interlocking(4, LinearHead(2)).actions(4, 6)
    theirs = OneForwardOneBackward().actions(4, 6)
    for left, right in zip(ours, theirs, strict=True):
        relevant = [a for a in left if a.kind is not Kind.HEAD]
        assert [(a.stage, a.kind is Kind.LEARN, a.microbatch) for a in relevant] == [
            (a.stage, a.kind is Kind.BACKWARD, a.microbatch) for a in right
        ]


@pytest.mark.parametrize("losses", [Farthest(), Sum(), Mean()])
def test_it_is_a_value(losses):
    schedule = Interlocking(2, (LinearHead(3), LinearHead(4)), losses, max_ahead=2)
    again = eval(repr(schedule), vars(pipeline).copy())
    assert again == schedule
    assert hash(again) == hash(schedule)


def test_sizes_are_positive_integers(subtests):
    for value in [0, -1, True, 2.0, None]:
        for name in ["window", "max_ahead"]:
            with (
                subtests.test(value=value, name=name),
                pytest.raises(
                    ValueError, match=f"^{name} must be a positive integer, got {value}$"
                ),
            ):
                Interlocking(**{"window": 2, name: value})


@pytest.mark.parametrize("losses", ["sum", Sum, None])
def test_losses_must_have_a_weight_method(losses):
    with pytest.raises(
        ValueError, match=r"^losses must have a method weight\(origin, stage, farth"
    ):
        Interlocking(2, LinearHead(2), losses)
