"""Errors of one rank: the same message on every rank, before training or within the timeout."""

import copy
import functools
import os
import re
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel import SubnetTrainer
from pyparallel.subnets import (
    Central,
    Heads,
    Hidden,
    Partition,
    Scaled,
    SequentialChain,
    Sharded,
    Unscaled,
)
from tests.subnets.helpers.models import Attention, mlp
from tests.workers import observe_ranks


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters):
    return torch.optim.Adam(parameters)


def between(*layers):
    return nn.Sequential(nn.Linear(5, 8), *layers, nn.Linear(8, 3))


def tied():
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.ReLU(), layer)


def shared_with_an_uncut_layer():
    model = nn.ModuleDict({"net": mlp(), "other": nn.Linear(5, 8)})
    model["other"].weight = model["net"][0].weight
    return model


def run_before():
    class Keeping(nn.Module):
        def forward(self, x):
            self.seen = x
            return x

    model = nn.Sequential(mlp(), Keeping())
    model(torch.randn(2, 5))
    return model


# What cannot be cut: a module, rules, and a part of the error. More: partition/test_*.py.
UNCUT = {
    "no chain": (lambda: nn.Linear(5, 8), None, "an nn.Sequential only, got a module of Linear"),
    "layer norm": (lambda: between(nn.LayerNorm(8)), None, "1 of LayerNorm, which normalizes"),
    "statistics": (
        lambda: between(nn.BatchNorm1d(8, track_running_stats=False)),
        None,
        "must track running statistics, got 1 with track_running_stats=False, whose output in eval "
        "mode would depend on the batch",
    ),
    "tied": (tied, None, "must be used once, got 0.weight, which is also 2.weight; untie them"),
    "used elsewhere": (
        shared_with_an_uncut_layer,
        Partition({"net": SequentialChain()}),
        "must be used once, got net.0.weight, which is also other.weight",
    ),
    "wrong name": (mlp, Partition({"": Hidden("0", "9")}), "got '9'; children: 0, 1, 2, 3, 4"),
    "no match": (mlp, Partition({"x.*": SequentialChain()}), "got 'x.*', which matches none"),
    "narrow": (lambda: mlp(1), None, "2 ranks and 0 with 1 units; leave it out of the rules or"),
    "copied": (run_before, Partition({"0": SequentialChain()}), "module must support copying"),
}


class Attending(nn.Module):
    """A module whose attention weights do not depend on the number of heads."""

    def __init__(self, heads):
        super().__init__()
        self.net = Attention(8, heads)


HEADS = Partition(
    {"net": Heads(queries="q", keys="k", values="v", project="out", attribute="heads")}
)
# Configurations that differ between ranks: arguments by rank, and a part of the error.
APART = {
    "nonfinite": (
        lambda rank: {"nonfinite": "skip" if rank else "raise"},
        "all ranks must have the same nonfinite, got raise on rank 0 and skip on rank 1",
    ),
    "no policy": (
        lambda rank: {"nonfinite": "ignore"} if rank else {},
        "rank 1: nonfinite must be 'raise', 'skip' or 'allow', got 'ignore'",
    ),
    "seed": (lambda r: {"partition": Partition(seed=r)}, "seed=0) on rank 0 and Partition("),
    "interval": (lambda r: {"interval": 2 + r}, "the same interval, got 2 on rank 0 and 3 on"),
    "placement": (
        lambda r: {"placement": Sharded() if r else Central()},
        "same placement, got Central(rank=0) on rank 0 and Sharded() on rank 1",
    ),
    "scale": (
        lambda r: {"scale": Scaled() if r else Unscaled()},
        "same scale, got Unscaled() on rank 0 and Scaled() on rank 1",
    ),
    "optimizer": (lambda r: {"optimizer_fn": [sgd, adam][r]}, "the same optimizer, got SGD on"),
    "shapes": (lambda r: {"module": mlp(8 + r)}, "same tensor 0, got 0.weight float32 [8, 5]"),
    "dtypes": (
        lambda r: {"module": mlp().to([torch.float32, torch.float64][r])},
        "same tensor 0, got 0.weight float32 [8, 5] cpu on rank 0 and 0.weight float64",
    ),
    "heads": (
        lambda r: {"module": Attending(2 + 2 * r), "partition": HEADS},
        "same width 0, got net.q of 2 units along",
    ),
    "no optimizer": (
        lambda r: {"optimizer_fn": [sgd, lambda p: None][r]},
        "rank 1: optimizer_fn must return a torch optimizer, got NoneType",
    ),
    "failing": (
        lambda r: {"optimizer_fn": [sgd, lambda p: sgd(p[:0])][r]},
        "rank 1: optimizer_fn: ValueError: optimizer got an empty parameter list",
    ),
}


def error_of(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def make(**change):
    arguments = {"module": mlp(), "optimizer_fn": sgd, "partition": Partition(), "interval": 2}
    return SubnetTrainer(**(arguments | change))


def refused_on_one(rank, name):
    build, partition, _ = UNCUT[name]
    module, partition = build(), partition or Partition()
    before = copy.deepcopy(module.state_dict())
    if rank == 0 and name not in {"narrow", "copied"}:
        module, partition = mlp(), Partition()
    if rank == 0 and name == "copied":
        module[1].seen = None
    error_text = error_of(lambda: make(module=module, partition=partition))
    after = module.state_dict()
    is_unchanged = (
        rank == 0 or name == "copied" or all(torch.equal(before[k], after[k]) for k in after)
    )
    return error_text, is_unchanged


def refused_before_training(rank, name):
    change, _ = APART[name]
    module = mlp()
    error_text = error_of(lambda: make(**({"module": module} | change(rank))))
    return error_text, all(p.isfinite().all() for p in module.parameters())


def train(trainer, steps, factor=1.0, closes=False):
    def closure():
        trainer.optimizer.zero_grad()
        loss = trainer(torch.randn(4, 5)).square().mean() * factor
        loss.backward()
        return loss

    for _ in range(steps):
        if closes:
            trainer.optimizer.step(closure)
        else:
            closure()
            trainer.optimizer.step()


def inside_full_model(rank):
    """Train and flush inside full_model(): the module is unchanged; a second entry is refused."""
    trainer = make()
    train(trainer, 1)
    with trainer.full_model() as module:
        before = copy.deepcopy(module.state_dict())
        error_text = error_of(lambda: trainer.full_model().__enter__())
        train(trainer, 2)
        trainer.flush()
        same = all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    return error_text, same, trainer.round_index, all(p.isnan().all() for p in module.parameters())


def full_model_on_one_and_flush_on_the_other(rank):
    trainer = make()
    train(trainer, 1)
    return error_of(lambda: trainer.full_model().__enter__() if rank else trainer.flush())


def unsupported_optimizer_state(rank):
    """A rank without a step has no state that could be refused."""
    trainer = make(optimizer_fn=torch.optim.Adafactor)
    if rank == 0:
        train(trainer, 1)
    return error_of(trainer.flush)


def states_of_other_rounds(rank):
    trainer = make(interval=1)
    first = copy.deepcopy(trainer.state_dict())
    train(trainer, 1)
    return error_of(lambda: trainer.load_state_dict(first if rank else trainer.state_dict()))


def frozen_on_one(rank):
    """Rank 1 freezes a shared layer between two merges; both can repair it and go on."""
    trainer = make()
    train(trainer, 3)
    trainer.subnet[-1].bias.requires_grad_(rank == 0)
    error_text = error_of(lambda: train(trainer, 1))
    trainer.subnet[-1].bias.requires_grad_(True)
    return error_text, error_of(lambda: train(trainer, 1)), trainer.round_index


def not_finite_on_one(rank):
    """Rank 1 gets a nan in one step, with and without a closure, by policy."""
    found = {}
    for policy, closes in product(("raise", "skip", "allow"), (False, True)):
        module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        trainer = make(module=module, nonfinite=policy, optimizer_fn=adam)
        parameters = list(trainer.subnet.parameters())
        train(trainer, 2)
        before = [p.clone() for p in parameters]
        train(trainer, 1, factor=float("nan") if rank else 1.0, closes=closes)
        unchanged = all(map(torch.equal, parameters, before))
        seen = all(p.grad is not None for p in parameters)
        error_text = error_of(functools.partial(train, trainer, 3))
        rows = trainer.state_dict()["whole"]["rows"].values()
        found[policy, closes] = (unchanged, seen, error_text, all(r.isfinite().all() for r in rows))
    return found


def statistics_that_are_nan(rank):
    """A step is skipped, but forward has put a nan into a running mean."""
    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    module.register_buffer("mask", torch.tensor([float("-inf")]))
    trainer = make(module=module, nonfinite="skip")
    train(trainer, 3)
    if rank == 0:
        trainer.subnet[1].running_mean[0] = float("nan")
    return error_of(trainer.flush)


def outside_of_the_group(rank):
    group = dist.new_group([1])
    return error_of(lambda: make(process_group=group))


def in_ddp(rank):
    return error_of(lambda: make(module=nn.parallel.DistributedDataParallel(mlp())))


def all_cases(rank):
    found = {("uncut", name): refused_on_one(rank, name) for name in UNCUT}
    found |= {("apart", name): refused_before_training(rank, name) for name in APART}
    cases = [
        inside_full_model,
        full_model_on_one_and_flush_on_the_other,
        unsupported_optimizer_state,
    ]
    cases += [states_of_other_rounds, outside_of_the_group, in_ddp, frozen_on_one]
    cases += [not_finite_on_one, statistics_that_are_nan]
    return found | {case.__name__: case(rank) for case in cases}


@pytest.fixture(scope="module")
def outcomes(ranks):
    return ranks.run(2, all_cases)


def test_an_uncuttable_module_on_one_rank_is_an_error_on_all(outcomes, subtests):
    for name in UNCUT:
        with subtests.test(str(name)):
            (first, _), (second, is_unchanged) = (rank["uncut", name] for rank in outcomes)
            assert first == second
            assert re.match(r"DisagreementError: (rank 1|ranks 0-1): ", first), first
            assert UNCUT[name][2] in first
            assert is_unchanged


def test_different_arguments_are_an_error_on_all_ranks_and_modules_stay_unchanged(
    outcomes, subtests
):
    for name in APART:
        with subtests.test(str(name)):
            (first, first_unchanged), (second, second_unchanged) = (
                rank["apart", name] for rank in outcomes
            )
            assert first == second
            assert first.startswith("DisagreementError: ")
            assert APART[name][1] in first
            assert first_unchanged
            assert second_unchanged


def test_training_continues_inside_full_model_and_it_is_not_entered_twice(outcomes):
    for rank in outcomes:
        error_text, same, rounds, is_released = rank["inside_full_model"]
        assert error_text == "RuntimeError: full_model() must not be entered inside itself"
        assert same
        assert rounds == 2
        assert is_released


def test_different_calls_are_an_error_on_all_ranks(outcomes):
    for rank in outcomes:
        assert rank["full_model_on_one_and_flush_on_the_other"].startswith(
            "DisagreementError: all ranks must make the same calls, got flush() in round 0 after 1 "
            "steps on rank 0 and full_model() in round 0 after 1 steps on rank 1"
        )


def test_a_layer_frozen_on_one_rank_is_an_error_on_all_before_anything_is_sent(outcomes):
    for error_text, then, num_merges in (rank["frozen_on_one"] for rank in outcomes):
        assert error_text.startswith(
            "DisagreementError: all ranks must have the same requires_grad, dtype and shape of "
        )
        assert "got True, torch.float32, [3] on rank 0 and False" in error_text
        assert (then, num_merges) == ("no error", 2)


def test_a_nan_on_one_rank_is_an_error_on_all_or_skipped_or_merged(outcomes, subtests):
    first, second = (rank["not_finite_on_one"] for rank in outcomes)
    for policy, closes in first:
        with subtests.test(f"{policy} {closes}"):
            unchanged, seen, error_text, is_finite = second[policy, closes]
            assert seen
            assert unchanged == (policy == "skip")
            assert error_text == first[policy, closes][2]
            assert is_finite == (policy != "allow")
            if policy == "raise":
                assert error_text.startswith(
                    "NonFiniteError: parameters must be finite to be merged, got nan or inf from "
                    "rank 1 in 0.weight in round 1"
                )
            else:
                assert error_text == "no error"
    for rank in outcomes:
        assert "from rank 0 in 1.running_mean in round 1" in rank["statistics_that_are_nan"]


def test_unsupported_optimizer_state_on_one_rank_stops_all(outcomes):
    first, second = (rank["unsupported_optimizer_state"] for rank in outcomes)
    assert first.startswith("ValueError: optimizer state must be floating-point and of its")
    assert second.startswith("DisagreementError: all ranks must have optimizer state for the same")


def test_states_of_other_rounds_are_not_loaded(outcomes):
    for rank in outcomes:
        assert rank["states_of_other_rounds"] == (
            "DisagreementError: all ranks must have the same round of state_dict, got 1 on rank 0 "
            "and 0 on rank 1"
        )


def test_a_rank_outside_of_the_group_is_refused(outcomes):
    first, second = (rank["outside_of_the_group"] for rank in outcomes)
    assert first == (
        "ValueError: process_group must contain this rank, got one without it; create the trainer "
        "on its ranks only"
    )
    assert second == "no error"


def dies_at(rank, moment):
    if rank == 1 and moment == "construction":
        os._exit(3)
    trainer = make()
    train(trainer, 2)
    if rank == 1:
        os._exit(3)
    if moment == "flush":
        trainer.flush()
    if moment == "full_model":
        trainer.full_model().__enter__()
    train(trainer, 2)


# Within a step: tests/test_dead_ranks.py.
@pytest.mark.parametrize("moment", ["construction", "flush", "full_model"])
def test_a_dead_rank_is_an_error_on_the_others(moment):
    first, dead, third = observe_ranks(3, dies_at, moment, group_timeout=5, time_limit=60)
    assert dead.exit_code == 3
    for rank, survivor in ((0, first), (2, third)):
        assert re.match(
            rf"PeerError: rank {rank}(, step \d)?: the [\w' -]+ failed: rank 1 died, or ended",
            survivor.error,
        ), survivor.error


def fails(rank):
    trainer = make()
    train(trainer, 3)
    if rank == 1:
        raise KeyError("no such file")
    train(trainer, 3)


def test_an_exception_in_user_code_is_an_error_on_the_others():
    survivor, failed = observe_ranks(2, fails, group_timeout=5, time_limit=60)
    assert failed.error == "KeyError: 'no such file'"
    assert survivor.error.startswith(
        "PeerError: rank 0, step 4: the all-gather failed: rank 1 died"
    )


def test_a_module_in_ddp_is_refused(outcomes):
    for rank in outcomes:
        assert rank["in_ddp"] == (
            "ArgumentTypeError: ranks 0-1: module must be the plain module, got "
            "DistributedDataParallel; pass ddp.module"
        )


def test_a_launched_process_without_a_group_warns_that_it_trains_alone(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    sentence = "^torchrun started 2 processes, but no process group is initialized, so this process"
    with pytest.warns(UserWarning, match=sentence) as caught:
        make()
    assert caught[0].filename == __file__
