"""Asynchronous LSGD: ranks at their own pace follow the leaders of all ranks' steps."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel.comm import Run, store_of
from pyparallel.gossip import AsynchronousLeaderSGD
from pyparallel.gossip.algorithms.pulls.leader import find_leader
from pyparallel.gossip.algorithms.pulls.leader_sgd import leader_sgd
from pyparallel.training import FlatBuckets
from tests.gossip.loops import batches, error_of, flat, start, take_step

RATE, STRENGTHS = 0.1, {"local_strength": 1.5, "global_strength": 0.8}
CURVATURE = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
CENTERS = torch.randn(4, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
ALGORITHM = AsynchronousLeaderSGD(2, 2, 4, **STRENGTHS)
NUM_STEPS = [9, 23, 14, 6]  # of each rank, so as uneven as slow ranks would make them


def gradient_and_loss(rank, x):
    away = x - CENTERS[rank]
    return CURVATURE * away, float((CURVATURE * away * away).sum() / 2)


def take_uneven_steps(rank):
    """Return x after each step, and after how many each choice of leaders came."""
    parameter = nn.Parameter(torch.full((3,), float(rank), dtype=torch.float64))
    buckets = FlatBuckets([parameter], 2**20)
    optimizer = torch.optim.SGD([parameter], lr=RATE)
    averager = ALGORITHM.start(nn.ParameterList([parameter]), optimizer, buckets, Run())
    history, choices = [], []
    for step in range(1, NUM_STEPS[rank] + 1):
        parameter.grad, loss = gradient_and_loss(rank, parameter.detach().clone())
        for read in averager.run.read_loss:
            read(loss)
        take_step(averager, optimizer)
        choices += [step] * (averager._num_choices - len(choices))
        history.append(parameter.detach().clone())
    averager.flush()
    choices += [NUM_STEPS[rank]] * (averager._num_choices - len(choices))
    return history, choices


def replay(choices):
    """Return x after each step of each rank by ``leader_sgd``, with choices when they came.

    Between two choices a rank reads nothing of the others.
    """
    x = [torch.full((3,), float(rank), dtype=torch.float64) for rank in range(4)]
    leaders = [[] for _ in range(4)]
    history, steps = [[] for _ in range(4)], [0] * 4

    def go_on(rank, until):
        losses = []
        while steps[rank] < until:
            gradient, loss = gradient_and_loss(rank, x[rank])
            x[rank] = leader_sgd(x[rank], RATE * gradient, RATE, leaders[rank])
            history[rank].append(x[rank])
            losses.append(loss)
            steps[rank] += 1
        return sum(losses) / len(losses) if losses else float("nan")

    overall = None
    for number, at in enumerate(zip(*choices, strict=True), 1):
        means = [go_on(rank, until) for rank, until in enumerate(at)]
        best = find_leader(means, range(4))
        if number * 2 % 4 == 0 and best is not None:
            overall = (x[best], STRENGTHS["global_strength"])
        for rank in range(4):
            first = rank // 2 * 2
            own = find_leader(means, range(first, first + 2))
            mine = [each for each in leaders[rank] if each[1] == STRENGTHS["local_strength"]]
            if own is not None:
                mine = [(x[own], STRENGTHS["local_strength"])]
            leaders[rank] = ([overall] if overall else []) + mine
    for rank in range(4):
        go_on(rank, NUM_STEPS[rank])
    return history


def test_ranks_at_their_own_pace_step_by_the_rule_of_the_paper(ranks):
    results = ranks.run(4, take_uneven_steps)
    choices = [each for _, each in results]
    assert len({len(each) for each in choices}) == 1
    assert len(choices[0]) == sum(NUM_STEPS) // (4 * 2)
    for number, at in enumerate(zip(*choices, strict=True), 1):
        assert sum(at) >= 8 * number  # leaders are chosen of all ranks' steps together
    for rank, (expected, (history, _)) in enumerate(zip(replay(choices), results, strict=True)):
        assert len(history) == NUM_STEPS[rank]
        torch.testing.assert_close(torch.stack(history), torch.stack(expected), rtol=0, atol=1e-12)


def train(model, optimizer, wrapped, data):
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(wrapped(inputs), targets)
        loss.backward()
        wrapped.record_loss(loss)
        optimizer.step()


def wait_for_a_slow_rank(rank):
    """The others take 3 steps for each of rank 3, all before the first choice; return all steps."""
    model, optimizer, wrapped = start(AsynchronousLeaderSGD(1, 16, 16))
    store = store_of(dist.group.WORLD)
    for step, batch in enumerate(batches(rank, 5 if rank == 3 else 15)):
        if rank == 3:  # a step is as long as three of each other rank
            store.wait([f"{each}/{3 * step + 2}" for each in range(3)], 30)
        train(model, optimizer, wrapped, [batch])
        store.set(f"{rank}/{step}", "")
    with wrapped.consensus():
        center = flat(model)
    return wrapped.metrics()["rank/steps"], center, wrapped.consensus_distance()


def test_no_rank_waits_for_a_slow_one_between_two_choices(ranks):
    results = ranks.run(4, wait_for_a_slow_rank)
    assert [steps for steps, _, _ in results] == [15, 15, 15, 5]
    for _, center, distance in results:
        assert torch.equal(center, results[0][1])
        assert distance == results[0][2] > 0


def save_and_resume(rank):
    model, optimizer, wrapped = start(ALGORITHM)
    train(model, optimizer, wrapped, batches(rank, 3 + rank))
    state = wrapped.algorithm_state_dict()
    train(model, optimizer, wrapped, batches(rank, 2 * rank))
    wrapped.flush()
    wrapped.load_algorithm_state_dict(state)
    again = wrapped.algorithm_state_dict()
    return state["choices"], state["missing"], again["choices"], again["missing"]


def test_a_state_has_how_far_the_choices_are(ranks):
    total = sum(3 + rank for rank in range(4))
    for found in ranks.run(4, save_and_resume):
        assert found == (total // 8, 8 - total % 8) * 2


def refuse(rank):
    _, _, wrapped = start(ALGORITHM)
    return [
        error_of(lambda: wrapped.join().__enter__()),
        error_of(lambda: AsynchronousLeaderSGD(2, local_pull=0.1)),
    ]


def test_what_it_cannot_do_is_one_sentence_on_every_rank(ranks):
    errors, *others = ranks.run(2, refuse)
    assert others == [errors]
    assert errors[0].startswith("ValueError: join() must be with an algorithm of rounds, got one")
    assert errors[1] == (
        "ValueError: local_strength and global_strength (the paper's rule) must be the only pulls, "
        "got local_pull; LeaderSGD has the authors' code"
    )


def test_it_has_a_name_of_its_own_in_saved_runs():
    assert repr(AsynchronousLeaderSGD(2)).startswith("AsynchronousLeaderSGD(ranks_per_node=2, ")
    with pytest.raises(ValueError, match="global_interval"):
        AsynchronousLeaderSGD(1, 4, 6)
