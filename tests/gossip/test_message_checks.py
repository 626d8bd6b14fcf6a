"""Messages and averages of ranks that do not step alike: one sentence, and nothing is averaged."""

import re
import warnings

import pytest
import torch
from torch import nn

from pyparallel.comm import PeerError
from pyparallel.compression import Int8
from pyparallel.gossip import SGP, AllReduce, LeaderSGD, LocalSGD, NoLoCo
from pyparallel.gossip.topology import RandomMatching, Ring, Star
from tests.cases import slow
from tests.gossip.loops import step, wrap
from tests.workers import on_ranks


def fill(model, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def steps_two_trainers(rank, algorithm):
    """Step A and B on rank 0, B and A on rank 1: they must not average A with B."""
    trainers = [wrap(algorithm, fill(nn.Linear(4, 2), value), lr=0.0) for value in (1.0, 2.0)]
    with pytest.raises(PeerError) as caught:
        trainers[rank][1].step()  # the other one is never reached
    values = [float(model.module.bias[0]) for model, _ in trainers]
    weights = [float(model.push_sum_weight) for model, _ in trainers]
    return str(caught.value), values, weights


@pytest.mark.parametrize(  # each waits for a timeout
    "algorithm", [SGP(Ring(2)), slow(NoLoCo(RandomMatching(2), interval=1)), slow(LocalSGD(1))]
)
def test_trainers_stepped_in_another_order_name_each_other(ranks, algorithm):
    outcomes = ranks.observe(2, steps_two_trainers, algorithm, group_timeout=2)
    (error, *state), (other_error, *other_state) = (outcome.value for outcome in outcomes)
    assert state == other_state == [[1.0, 2.0], [1.0, 1.0]]
    pattern = r"got step 1 of trainer (\d+) on rank 0, step 1 of trainer (\d+) on rank 1;"
    numbers = [tuple(map(int, re.search(pattern, each).groups())) for each in (error, other_error)]
    (trainer, other_trainer), again = numbers
    assert (other_trainer - trainer, again) == (1, numbers[0])


@on_ranks(2)
def test_a_users_own_messages_pass_those_of_a_trainer(rank):
    """Receive from the other rank across a step, in messages of any length."""
    model, optimizer = wrap(SGP(Ring(2)), fill(nn.Linear(4, 2), 1.0), lr=0.0)
    for numel in (1, 8192, sum(len(buffer) for buffer in model._buckets.buffers)):
        message = torch.full((numel,), 7.0)
        if rank == 0:
            message.zero_()
            work = torch.distributed.irecv(message, 1)
        optimizer.step()
        if rank == 1:
            work = torch.distributed.isend(message, 0)
        work.wait()
        assert (message == 7).all()
    assert model.module.bias[0] == 1


def drops_its_replicas(averager):
    averager.reset()


def counts_a_step(averager):
    averager.run.counts.steps += 1


def counts_a_repeat(averager):
    averager.run.counts.repeats += 1


def is_a_round_ahead(averager):
    averager.round_index += 2


def has_a_large_weight(averager):
    averager._round_buffers[0].weight.fill_(1e300)


def has_no_weight(averager):
    averager._round_buffers[0].weight.fill_(0)


INT8 = SGP(Ring(2), compressor=Int8())
HEADERS = [
    (INT8, drops_its_replicas, "as long as the receiver expects, in bytes, got "),
    (SGP(Ring(2)), counts_a_step, "sent after as many optimizer steps, got "),
    (SGP(Ring(2), overlap=2), counts_a_repeat, "sent after as many steps without a training forw"),
    (LocalSGD(1), counts_a_step, "sent after as many optimizer steps, got 3 on rank 0 and 4 on "),
    (LeaderSGD(1, 1, 1), counts_a_step, "optimizer steps, got 3 on rank 0 and 4 on rank 1: step "),
    (NoLoCo(RandomMatching(2), 1), counts_a_step, "sent after as many optimizer steps, got "),
    (SGP(Ring(2)), is_a_round_ahead, "of the same round, got "),
]
MASSES = [
    (SGP(Ring(2)), has_a_large_weight, "its share 0.5, got 5e+299 from rank 1"),
    (SGP(Ring(2)), has_no_weight, "its share 0.5, got 0.0 from rank 1"),
    (SGP(Star(2)), has_a_large_weight, "in (0, 2], got 5e+299 from rank 1"),
]


def disagrees(rank, cases, num_steps):
    """Return the error of each case, and whether the parameters are as before the last step."""
    found = []
    for algorithm, disagree, _ in cases:
        model, optimizer = wrap(algorithm, nn.Linear(64, 8), lr=0.0)
        for _ in range(2):
            model.record_loss(1.0)
            optimizer.step()
        model.flush()
        if rank == 1:
            disagree(model._averager)
        before = model.module.weight.detach().clone()
        try:
            for _ in range(num_steps):
                model.record_loss(1.0)
                optimizer.step()
        except PeerError as error:
            found.append((str(error), torch.equal(before, model.module.weight)))
        else:
            found.append(("", False))
        if rank == 0:
            assert abs(float(model.push_sum_weight) - 1) < 1e-12
        torch.distributed.barrier()
    return found


def test_messages_that_do_not_fit_are_one_sentence_and_change_nothing(ranks):
    for rank, found in enumerate(ranks.run(2, disagrees, HEADERS, 3)):
        for (algorithm, _, sentence), (error, is_unchanged) in zip(HEADERS, found, strict=True):
            assert error.startswith(f"rank {rank}, "), (algorithm, error)
            assert sentence in error, (algorithm, error)
            assert "rank 0" in error
            assert "rank 1" in error
            assert is_unchanged, algorithm


def test_impossible_masses_name_their_sender(ranks):
    found = ranks.run(2, disagrees, MASSES, 1)[0]
    for (algorithm, _, sentence), (error, is_unchanged) in zip(MASSES, found, strict=True):
        assert sentence in error, (algorithm, error)
        assert is_unchanged, algorithm


@on_ranks(2)
def test_counts_are_not_compared_in_join_which_leaves_no_configuration_behind(rank):
    """Train with unequal numbers of batches in join(), twice, then with equal ones."""
    for algorithm in (SGP(Ring(2)), SGP(Ring(2), overlap=2), LocalSGD(2), AllReduce()):
        model, optimizer = wrap(algorithm, nn.Linear(4, 2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                with model.join():
                    for _ in range(2 + 2 * rank):
                        step(model, optimizer)
            assert not model._rounds.joined._join_config.enable, algorithm
            for _ in range(3):
                step(model, optimizer)
            model.flush()
        assert model._averager.run.counts.steps == 3, algorithm


def steps_twice(model, optimizer):
    optimizer.step()


def steps_alone(model, optimizer):
    with model.no_sync():
        step(model, optimizer)


def steps_unlike(rank, algorithm, mistake):
    """Return the error of each rank, of which one has made a mistake in its second step."""
    model, optimizer = wrap(algorithm, nn.Linear(4, 2), lr=0.0)
    try:
        for index in range(12):
            step(model, optimizer)
            if rank == 1 and index == 1:
                mistake(model, optimizer)
    except PeerError as error:
        return str(error)
    return None


RULES = {
    steps_twice: "sent after as many steps without a training forward",
    steps_alone: "sent after as many optimizer steps",
}


def test_a_step_that_one_rank_takes_alone_is_told_at_the_next_round(ranks):
    algorithms = SGP(Ring(2)), SGP(Ring(2), overlap=1), LocalSGD(4)
    cases = [(algorithm, mistake) for algorithm in algorithms for mistake in RULES]
    for (algorithm, mistake), found in zip(
        cases, ranks.run_each(2, steps_unlike, cases), strict=True
    ):
        for rank, error in enumerate(found):
            assert error is not None, (algorithm, mistake)
            assert error.startswith(f"rank {rank}, "), error
            assert RULES[mistake] in error, (algorithm, mistake, error)
            assert "on rank 0" in error
            assert "on rank 1" in error


def skips_a_batch(rank):
    model, optimizer = wrap(SGP(Ring(2)), nn.Linear(4, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(6):
            if rank == 1 and index in (2, 4):
                model(torch.randn(6, 4))  # and an exception in the loss, say
            step(model, optimizer)
    return [str(each.message) for each in caught]


def test_a_skipped_batch_is_one_warning_with_both_numbers(ranks):
    for rank, found in enumerate(ranks.run(2, skips_a_batch)):
        assert len(found) == 1, found
        numbers = ("3 on rank 0 and 4 on rank 1", "4 on rank 1 and 3 on rank 0")[rank]
        assert f"unequal numbers of training forwards, {numbers}: expected if" in found[0]
