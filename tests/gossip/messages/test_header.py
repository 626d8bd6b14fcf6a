"""Headers of messages: what does not fit is an error on the host, and left out on a device."""

import math
import warnings

import pytest
import torch

from pyparallel.comm.counts import (
    ANY,
    FORWARDS,
    LENGTH,
    MASS,
    NONFINITE,
    REPEATS,
    ROUND,
    STEPS,
    TRAINER,
    StepCounts,
)
from pyparallel.comm.errors import NonFiniteError, PeerError
from pyparallel.gossip.messages import MessageHeaders
from tests.local_transport import LocalRun
from tests.ops.op_counter import ByteCounter

LENGTH_SENT = 4096


def received(changes, *, masses_in=(0.5,), counts=None):
    """Return headers with one received row: like the own one, but for some fields."""
    headers = MessageHeaders(LocalRun(0, 2, counts or StepCounts(12, 0, 14)))
    of_round = headers.of_round(
        12, torch.tensor([0.5]).double(), LENGTH_SENT, [1], masses_in=masses_in
    )
    of_round.received.copy_(of_round.sent)
    for field, value in changes.items():
        of_round.received[0, field] = value
    return headers, of_round


MISFITS = {
    TRAINER: (3, "the same trainer, got 0 on rank 0 and 3 on rank 1: step all trainers in the sam"),
    ROUND: (13, "the same round, got 12 on rank 0 and 13 on rank 1: load checkpoints of one step"),
    LENGTH: (-80, "in bytes, got 4096 on rank 0 and -80 on rank 1: wrap equal models, and load"),
    STEPS: (13, "after as many optimizer steps, got 12 on rank 0 and 13 on rank 1: step alike"),
    REPEATS: (1, "got 0 on rank 0 and 1 on rank 1: call optimizer.step() once after each forward"),
}


def test_a_header_that_does_not_fit_names_both_ranks_both_values_and_what_to_do():
    for field, (value, sentence) in MISFITS.items():
        _, of_round = received({field: value})
        with pytest.raises(PeerError, match=r"^rank 0, step 12: .* 1 -> 0 must be") as caught:
            of_round.check()
        assert sentence in str(caught.value)


def test_masses_must_be_possible():
    for masses_in, sentence, bad in [
        ((0.5,), r"its share 0.5", (0, 0.25, 5, 1e300, math.nan, math.inf, -0.5, 0.5001)),
        ((), r"in \(0, 2\]", (0, 2.5, 1e300, math.nan, math.inf, -math.inf, -1)),
    ]:
        for mass in bad:
            _, of_round = received({MASS: mass}, masses_in=masses_in)
            pattern = rf"edge 1 -> 0 must be {sentence}, got {float(mass)!r} from rank 1".replace(
                "+", "."
            )
            with pytest.raises(PeerError, match=pattern):
                of_round.check()
        _, of_round = received({MASS: 0.5 * (1 + 1e-9)}, masses_in=masses_in)
        assert of_round.check().tolist() == [0.5 * (1 + 1e-9)]


def test_a_rank_without_batches_is_not_compared():
    for changes, counts in [
        ({STEPS: ANY, REPEATS: ANY, FORWARDS: ANY}, None),
        ({}, StepCounts(ANY, ANY, ANY)),
    ]:
        _, of_round = received(changes, counts=counts)
        assert of_round.check().tolist() == [0.5]


def test_unequal_numbers_of_forwards_are_one_warning():
    headers, of_round = received({FORWARDS: 15})
    with pytest.warns(UserWarning, match=r"forwards, 14 on rank 0 and 15 on rank 1: expected if"):
        assert of_round.check().tolist() == [0.5]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of_round.check()
    headers.raise_nonfinite()


def test_a_sender_whose_gradient_is_not_finite_is_named_after_the_round():
    for policy in ("raise", "skip", "allow"):
        headers, of_round = received({NONFINITE: 7})
        headers.run.counts.policy = policy
        assert of_round.check().tolist() == [0.5]
        if policy == "raise":
            with pytest.raises(
                NonFiniteError, match=r"^rank 0, step 12: .* got 7 entries .* rank 1"
            ):
                headers.raise_nonfinite()
        headers.raise_nonfinite()  # once


def test_the_number_of_bad_gradients_may_lie_on_a_device():
    counts = StepCounts(nonfinite=torch.tensor(3.0).double())
    _, of_round = received({}, counts=counts)
    assert of_round.sent[0, NONFINITE] == 3


def screen(changes, **options):
    headers, of_round = received(changes, **options)
    masses = headers.screen(of_round.expected, of_round.received)
    return headers, masses.tolist()


def test_on_a_device_a_misfit_has_no_mass_and_a_later_call_raises():
    """The functions that run on a GPU, here on the CPU: they read no number of their tensors."""
    device = torch.device("cpu")
    headers, masses = screen({})
    assert masses == [0.5]
    headers._raise_counted(device)
    misfits = {field: value for field, (value, _) in MISFITS.items()}
    for field, value in [*misfits.items(), *((MASS, m) for m in (0, 5, 1e300, math.nan))]:
        headers, masses = screen({field: value})
        assert masses == [0], field
        with pytest.raises(PeerError, match="edge 1 -> 0 must be"):
            headers._raise_counted(device)
        headers._raise_counted(device)  # once
    headers, masses = screen({NONFINITE: 2})
    assert masses == [0.5]
    with pytest.raises(NonFiniteError, match="got 2 entries"):
        headers._raise_counted(device)
    headers, masses = screen({FORWARDS: 15})
    assert masses == [0.5]
    with pytest.warns(UserWarning, match="unequal numbers of training forwards"):
        headers._raise_counted(device)
    for shadowing in ({STEPS: ANY, REPEATS: ANY, FORWARDS: ANY}, {LENGTH: LENGTH_SENT}):
        headers, masses = screen(shadowing)
        headers._raise_counted(device)


@pytest.mark.parametrize("masses_in", [(), [0.5]])
def test_on_a_device_a_screen_is_one_op(masses_in):
    headers, of_round = received({}, masses_in=masses_in)
    headers._raise_counted(torch.device("cpu"))  # as before the round
    with ByteCounter() as counter:
        headers.screen(of_round.expected, of_round.received)
    assert counter.num_ops == 1


def test_on_a_device_misfits_that_are_forgotten_are_still_counted():
    headers, _ = screen({STEPS: 13})
    headers._recent.clear()
    with pytest.raises(PeerError, match="got 1 with another one, which were left out"):
        headers._raise_counted(torch.device("cpu"))


def test_gathered_headers_are_one_error_on_all_ranks():
    row = LocalRun(0, 3).row(torch.device("cpu"), 4).tolist()
    rows = [list(row) for _ in range(3)]
    rows[0][STEPS] = ANY  # in join()
    rows[2][STEPS] = 5
    sentence = "parameters that rank 2 averages must be .* got 0 on rank 1 and 5 on rank 2: step"
    for rank in range(3):
        headers = MessageHeaders(LocalRun(rank, 3))
        with pytest.raises(PeerError, match=f"rank {rank}, step 4: .*{sentence}"):
            headers.check_gathered(rows)
        rows_of_bad = [[*row[:NONFINITE], float(other == 1)] for other in range(3)]
        headers.check_gathered(rows_of_bad)
        if rank == 1:  # it has raised its own error
            headers.raise_nonfinite()
        else:
            with pytest.raises(NonFiniteError, match="on rank 1"):
                headers.raise_nonfinite()
