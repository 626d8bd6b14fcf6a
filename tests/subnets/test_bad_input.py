"""Errors of one rank: the same message on every rank, before training or within the timeout."""

import copy
import os
import re
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel import SubnetTrainer
from pyparallel.comm import DisagreementError, NonFiniteError
from pyparallel.subnets import Central, Heads, Partition, Scaled, SequentialChain, Sharded, Unscaled
from tests.cases import slow
from tests.subnets.helpers.models import Attention, mlp
from tests.workers import assert_equal_on_all_ranks, call_each, observe_ranks

sgd = partial(torch.optim.SGD, lr=0.1)
adam = torch.optim.Adam


def between(*layers):
    return nn.Sequential(nn.Linear(5, 8), *layers, nn.Linear(8, 3))


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
    "no chain": (
        lambda: nn.Linear(5, 8),
        None,
        "an nn.Sequential only, got a module of Linear; declare what",
    ),
    "statistics": (
        lambda: between(nn.BatchNorm1d(8, track_running_stats=False)),
        None,
        "must track running statistics, got 1 with track_running_stats=False, whose output in eval "
        "mode would depend on the batch",
    ),
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


def assert_refused(function, error, *parts):
    """Check that a call raises an error whose text, with these parts, is the same on all ranks."""
    with pytest.raises(error) as caught:
        function()
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert_equal_on_all_ranks(str(caught.value))


def make(**change):
    arguments = {"module": mlp(), "optimizer_fn": sgd, "partition": Partition(), "interval": 2}
    return SubnetTrainer(**(arguments | change))


def an_uncuttable_module_on_one_rank_is_an_error_on_all(rank):
    for name, (build, rules, sentence) in UNCUT.items():
        module, partition = build(), rules or Partition()
        before = copy.deepcopy(module.state_dict())
        if rank == 0 and name not in {"narrow", "copied"}:
            module, partition = mlp(), Partition()
        if rank == 0 and name == "copied":
            module[1].seen = None
        with pytest.raises(DisagreementError, match=r"^(rank 1|ranks 0-1): ") as caught:
            make(module=module, partition=partition)
        assert sentence in str(caught.value)
        assert_equal_on_all_ranks(str(caught.value))
        after = module.state_dict()
        if rank == 1 and name != "copied":
            assert all(torch.equal(before[key], after[key]) for key in after), name


def different_arguments_are_an_error_on_all_ranks_and_modules_stay_unchanged(rank):
    for change, sentence in APART.values():
        module = mlp()
        arguments = {"module": module} | change(rank)
        assert_refused(lambda arguments=arguments: make(**arguments), DisagreementError, sentence)
        assert all(p.isfinite().all() for p in module.parameters()), sentence


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


def training_continues_inside_full_model_and_it_is_not_entered_twice(rank):
    """Train and flush inside full_model(): the module is unchanged; a second entry is refused."""
    trainer = make()
    train(trainer, 1)
    with trainer.full_model() as module:
        before = copy.deepcopy(module.state_dict())
        with pytest.raises(RuntimeError, match="must not be entered inside itself"):
            trainer.full_model().__enter__()
        train(trainer, 2)
        trainer.flush()
        assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    assert trainer.round_index == 2
    assert all(p.isnan().all() for p in module.parameters())


def unsupported_optimizer_state_on_one_rank_stops_all(rank):
    """A rank without a step has no state that could be refused."""
    trainer = make(optimizer_fn=torch.optim.Adafactor)
    if rank == 0:
        train(trainer, 1)
    error, sentence = (
        (DisagreementError, "all ranks must have optimizer state for the same")
        if rank
        else (ValueError, "optimizer state must be floating-point and of its")
    )
    with pytest.raises(error, match=f"^{sentence}"):
        trainer.flush()


def states_of_other_rounds_are_not_loaded(rank):
    trainer = make(interval=1)
    first = copy.deepcopy(trainer.state_dict())
    train(trainer, 1)
    assert_refused(
        lambda: trainer.load_state_dict(first if rank else trainer.state_dict()),
        DisagreementError,
        "all ranks must have the same round of state_dict, got 1 on rank 0 and 0 on rank 1",
    )


def a_layer_frozen_on_one_rank_is_an_error_on_all_before_anything_is_sent(rank):
    """Rank 1 freezes a shared layer between two merges; both can repair it and go on."""
    trainer = make()
    train(trainer, 3)
    trainer.subnet[-1].bias.requires_grad_(rank == 0)
    assert_refused(
        lambda: train(trainer, 1),
        DisagreementError,
        "all ranks must have the same requires_grad, dtype and shape of ",
        "got True, torch.float32, [3] on rank 0 and False",
    )
    trainer.subnet[-1].bias.requires_grad_(True)
    train(trainer, 1)
    assert trainer.round_index == 2


def a_nan_on_one_rank_is_an_error_on_all_or_skipped_or_merged(rank):
    """Rank 1 gets a nan in one step, with and without a closure, by policy."""
    for policy, closes in product(("raise", "skip", "allow"), (False, True)):
        module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        trainer = make(module=module, nonfinite=policy, optimizer_fn=adam)
        parameters = list(trainer.subnet.parameters())
        train(trainer, 2)
        before = [p.clone() for p in parameters]
        train(trainer, 1, factor=float("nan") if rank else 1.0, closes=closes)
        if rank:
            assert all(map(torch.equal, parameters, before)) == (policy == "skip")
            assert all(p.grad is not None for p in parameters)
        if policy == "raise":
            sentence = (
                "parameters must be finite to be merged, got nan or inf from rank 1 in 0.weight in "
                "round 1"
            )
            assert_refused(lambda: train(trainer, 3), NonFiniteError, sentence)  # noqa: B023
        else:
            train(trainer, 3)
        rows = trainer.state_dict()["shards"]["rows"].values()
        assert rank == 0 or all(r.isfinite().all() for r in rows) == (policy != "allow")


def statistics_that_are_nan_are_an_error_on_all(rank):
    """A step is skipped, but forward has put a nan into a running mean."""
    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    module.register_buffer("mask", torch.tensor([float("-inf")]))
    trainer = make(module=module, nonfinite="skip")
    train(trainer, 3)
    if rank == 0:
        trainer.subnet[1].running_mean[0] = float("nan")
    assert_refused(trainer.flush, NonFiniteError, "from rank 0 in 1.running_mean in round 1")


def a_rank_outside_of_the_group_is_refused(rank):
    group = dist.new_group([1])
    if rank:
        make(process_group=group)
        return
    with pytest.raises(ValueError, match="process_group must contain this rank, got one without"):
        make(process_group=group)


def a_module_in_ddp_is_refused(rank):
    assert_refused(
        lambda: make(module=nn.parallel.DistributedDataParallel(mlp())),
        TypeError,
        "ranks 0-1: module must be the plain module, got DistributedDataParallel; pass ddp.module",
    )


CASES = [
    an_uncuttable_module_on_one_rank_is_an_error_on_all,
    different_arguments_are_an_error_on_all_ranks_and_modules_stay_unchanged,
    training_continues_inside_full_model_and_it_is_not_entered_twice,
    unsupported_optimizer_state_on_one_rank_stops_all,
    states_of_other_rounds_are_not_loaded,
    a_layer_frozen_on_one_rank_is_an_error_on_all_before_anything_is_sent,
    a_nan_on_one_rank_is_an_error_on_all_or_skipped_or_merged,
    statistics_that_are_nan_are_an_error_on_all,
    a_rank_outside_of_the_group_is_refused,
    a_module_in_ddp_is_refused,
]


def test_mistakes(ranks):
    ranks.run(2, call_each, [(case,) for case in CASES])


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
@pytest.mark.parametrize("moment", ["flush", slow("construction"), slow("full_model")])
def test_a_dead_rank_is_an_error_on_the_others(moment):
    first, dead, third = observe_ranks(3, dies_at, moment, group_timeout=5, time_limit=150)
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
    survivor, failed = observe_ranks(2, fails, group_timeout=5, time_limit=150)
    assert failed.error == "KeyError: 'no such file'"
    assert survivor.error.startswith(
        "PeerError: rank 0, step 4: the all-gather failed: rank 1 died"
    )


def test_a_launched_process_without_a_group_warns_that_it_trains_alone(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    sentence = "^torchrun started 2 processes, but no process group is initialized, so this process"
    with pytest.warns(UserWarning, match=sentence) as caught:
        make()
    assert caught[0].filename == __file__
