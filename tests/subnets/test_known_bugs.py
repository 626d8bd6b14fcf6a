"""Bugs of published implementations of this method, which must not occur here."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel import SubnetTrainer
from pyparallel.comm import DisagreementError
from pyparallel.subnets import Central, Partition, Sharded
from tests.workers import run_ranks

RANKS = 4
ROUNDS = 20
PLACEMENTS = {"sharded": Sharded(), "central": Central(0)}
CASES = [((8, 8), "sharded"), ((13, 10), "central"), ((4, 5), "sharded")]


def counter(interval, widths, placement):
    """Return a trainer of zeros: every entry gains 1 in each step of a rank that trains it."""
    first, second = widths
    model = nn.Sequential(nn.Linear(5, first), nn.Linear(first, second), nn.Linear(second, 3))
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.zero_()
    return SubnetTrainer(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        Partition(seed=1),
        interval,
        placement=placement,
    )


def count_steps(trainer, steps):
    for _ in range(steps):
        trainer.optimizer.zero_grad()
        sum(-parameter.sum() for parameter in trainer.subnet.parameters()).backward()
        trainer.optimizer.step()


def held(trainer):
    with trainer.full_model() as module:
        return [parameter.detach().clone() for parameter in module.parameters()]


def many_rounds(rank, widths, place):
    trainer = counter(1, widths, PLACEMENTS[place])
    had = []
    for _ in range(ROUNDS):
        had.append(trainer.units)
        count_steps(trainer, 1)
    return had, held(trainer)


def around_a_merge(rank):
    """Return, by steps taken, the rounds and counts before and after the next scatter."""
    found = {}
    for steps in range(1, 8):
        trainer = counter(3, (16, 16), Sharded())
        count_steps(trainer, steps)
        rounds, merged = trainer.round_index, trainer.state_dict()["whole"]["rows"]["0.weight"]
        merged = merged.clone()
        trainer.flush()
        trainer.flush()
        found[steps] = rounds, merged, trainer.round_index, held(trainer)
    return found


def evaluated(rank):
    """Return the full model's outputs for samples in batches of one, two and six."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.BatchNorm1d(6),
        nn.Linear(6, 3),
    ).double()  # fmt: skip
    trainer = SubnetTrainer(model, lambda p: torch.optim.SGD(p, lr=0.1), Partition(), 2)
    for _ in range(5):
        trainer.optimizer.zero_grad()
        trainer(torch.randn(6, 5, dtype=torch.float64)).square().mean().backward()
        trainer.optimizer.step()
    samples = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    with trainer.full_model() as module, torch.no_grad():
        module.eval()
        return [torch.cat([module(batch) for batch in samples.split(n)]) for n in (1, 2, 6)]


def all_cases(rank):
    found = {case: many_rounds(rank, *case) for case in CASES}
    return found | {case.__name__: case(rank) for case in (around_a_merge, evaluated)}


@functools.cache
def ranks():
    return run_ranks(RANKS, all_cases)


def test_every_unit_is_assigned_to_every_rank(subtests):
    for widths, place in CASES:
        with subtests.test(f"{widths} {place}"):
            # Bug: without row offsets only the first quarter of a matrix was ever trained.
            for rank in ranks():
                had, counted = rank[widths, place]
                for name, units in zip(("0", "1"), widths, strict=True):
                    seen = torch.cat([units_of_round[name] for units_of_round in had])
                    assert set(seen.tolist()) == set(range(units))
                first, first_bias, inner, inner_bias, last, _ = counted
                assert all((each == ROUNDS).all() for each in (first, first_bias, inner_bias, last))
                assert (inner > 0).all()
                assert (inner < ROUNDS).all()


def test_widths_need_not_be_divisible(subtests):
    for widths, place in CASES:
        with subtests.test(f"{widths} {place}"):
            gathered = [rank[widths, place][0] for rank in ranks()]
            for had in zip(*gathered, strict=True):
                for name, units in zip(("0", "1"), widths, strict=True):
                    pieces = [each[name] for each in had]
                    assert sorted(torch.cat(pieces).tolist()) == list(range(units))
                    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


def test_a_merge_includes_the_last_step_of_its_interval():
    # Bug: the merge came two steps early, and the next scatter overwrote the last step.
    for rank in ranks():
        for steps, (rounds, merged, *_) in rank["around_a_merge"].items():
            assert rounds == steps // 3
            assert (merged == steps - steps % 3).all()


def test_the_tail_of_an_epoch_is_merged_and_only_once():
    # Bug: the steps beyond the last full interval were dropped.
    for rank in ranks():
        for steps, (rounds, _, rounds_in_all, whole) in rank["around_a_merge"].items():
            assert rounds_in_all == rounds + (steps % 3 > 0)
            first, first_bias, _, inner_bias, last, shared = whole
            everywhere = (first, first_bias, inner_bias, last, shared)
            assert all((each == steps).all() for each in everywhere)


def test_outputs_do_not_depend_on_the_batch():
    for rank in ranks():
        one_by_one, pairs, at_once = rank["evaluated"]
        torch.testing.assert_close(one_by_one, at_once, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(pairs, at_once, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(at_once, ranks()[0]["evaluated"][2], rtol=0, atol=0)


def test_a_norm_without_running_statistics_is_refused():
    assert not dist.is_initialized()
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    model = nn.Sequential(nn.Linear(5, 8), norm, nn.Linear(8, 3))
    with pytest.raises(
        DisagreementError, match="whose output in eval mode would depend on the batch"
    ):
        SubnetTrainer(model, lambda p: torch.optim.SGD(p, lr=0.1), Partition(), 2)
