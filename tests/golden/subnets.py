"""Jobs of SubnetTrainer: every placement, scale, rule and optimizer state policy."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyparallel import SubnetTrainer
from pyparallel.subnets import (
    Averaged,
    CarryState,
    Central,
    FeedForward,
    Heads,
    Hidden,
    Partition,
    ResetState,
    Scaled,
    SequentialChain,
    Sharded,
    Unscaled,
)
from tests.golden.job import Job, Result, listed
from tests.golden.models import WIDTH, Linear, adam, batch, plain_sgd, sgd, squared_error

small_steps = partial(torch.optim.SGD, lr=0.0078125, momentum=0.5)
amsgrad = partial(torch.optim.AdamW, lr=0.0625, amsgrad=True)


NUM_RANKS = 2
INTERVAL = 3


class SubnetRun:
    """A training loop with SubnetTrainer."""

    def __init__(
        self,
        model: nn.Module,
        optimizer_fn: Callable[[Any], Any],
        partition: Partition,
        samples: int,
        **options: Any,
    ) -> None:
        self.trainer = SubnetTrainer(model, optimizer_fn, partition, INTERVAL, **options)
        self.samples = samples
        self.losses: list[float] = []

    def train(self, steps: Sequence[int]) -> None:
        for step in steps:
            inputs, targets = batch(step, self.samples)
            self.trainer.optimizer.zero_grad()
            loss = squared_error(self.trainer(inputs), targets)
            loss.backward()
            self.trainer.optimizer.step()
            self.losses.append(loss.item())

    def pause(self) -> None:
        pass

    def save(self) -> Any:
        return {
            "trainer": self.trainer.state_dict(),
            "subnet": self.trainer.subnet.state_dict(),
            "optimizer": self.trainer.optimizer.state_dict(),
        }

    def load(self, saved: Any, way: int) -> None:
        self.trainer.load_state_dict(saved["trainer"])

    def load_others(self, saved: Any) -> None:
        self.trainer.subnet.load_state_dict(saved["subnet"])
        self.trainer.optimizer.load_state_dict(saved["optimizer"])

    def finish(self) -> Result:
        self.trainer.flush()
        found = {"losses": self.losses, "round": [self.trainer.round_index]}
        found |= listed({f"units of {name}": units for name, units in self.trainer.units.items()})
        with self.trainer.full_model() as module:
            found |= listed(module.state_dict())
        self.trainer.close()
        return found


class Mixer(nn.Module):
    """Attention without softmax over the three features as tokens."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = Linear(1, 3 * width, bias=True, name="qkv")
        self.project = Linear(width, 1, bias=True, name="project")

    def forward(self, value: Tensor) -> Tensor:
        queries, keys, values = (
            each.unflatten(-1, (self.num_heads, -1)) for each in self.qkv(value).chunk(3, -1)
        )
        likeness = (queries * keys).sum(-1, keepdim=True) / 8
        return value + self.project((likeness * values).flatten(-2))


class Apart(nn.Module):
    """The same, with separate layers for queries, keys and values."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (Linear(1, width, bias=True, name=name) for name in "qkv")
        self.out = Linear(width, 1, bias=True, name="out")

    def forward(self, value: Tensor) -> Tensor:
        queries, keys, values = (
            layer(value).unflatten(-1, (self.heads, -1)) for layer in (self.q, self.k, self.v)
        )
        likeness = (queries * keys).sum(-1, keepdim=True) / 8
        return value + self.out((likeness * values).flatten(-2))


def _chain() -> nn.Sequential:
    return nn.Sequential(
        Linear(WIDTH, 4, bias=True, name="0"),
        nn.LeakyReLU(0.25),
        Linear(4, 3, name="2"),
        nn.LeakyReLU(0.25),
        Linear(3, WIDTH, bias=True, name="4"),
    )


def _normed() -> nn.Sequential:
    return nn.Sequential(
        Linear(WIDTH, 4, name="0"), nn.BatchNorm1d(4), nn.PReLU(4), Linear(4, WIDTH, name="3")
    )


def _attentive() -> nn.Sequential:
    forward = nn.Sequential(
        Linear(1, 4, bias=True, name="expand"),
        nn.LeakyReLU(0.25),
        Linear(4, 1, bias=True, name="contract"),
    )
    return nn.Sequential(
        nn.Unflatten(-1, (WIDTH, 1)), Mixer(2, 4), forward, Apart(2, 4), nn.Flatten(-2)
    )


OF_ATTENTION = {
    "1": Heads(qkv="qkv", project="project"),
    "2": FeedForward("0", "2"),
    "3": Heads(queries="q", keys="k", values="v", project="out", attribute="heads"),
}


def _job(
    model_fn: Callable[[], nn.Module] = _chain,
    optimizer_fn: Callable[[Any], Any] = sgd,
    partition: Partition | None = None,
    samples: int = 1,
    **options: Any,
) -> Job:
    partition = partition or Partition(seed=5)
    return Job(
        lambda: SubnetRun(model_fn(), optimizer_fn, partition, samples, **options),
        exact=samples == 1 and optimizer_fn in (sgd, plain_sgd, small_steps),  # no square roots
    )


JOBS = {
    "carry": _job(optimizer_state=CarryState()),
    "carry-adam": _job(optimizer_fn=adam),
    "carry-amsgrad": _job(optimizer_fn=amsgrad),
    "reset": _job(optimizer_state=ResetState()),
    "reset-adam": _job(optimizer_fn=adam, optimizer_state=ResetState()),
    "plain": _job(optimizer_fn=plain_sgd, placement=Sharded(), scale=Unscaled()),
    "central": _job(placement=Central(0)),
    "central-1-adam": _job(optimizer_fn=adam, placement=Central(1)),
    "averaged": _job(optimizer_fn=small_steps, scale=Averaged()),
    "averaged-central": _job(optimizer_fn=adam, placement=Central(0), scale=Averaged()),
    "scaled": _job(optimizer_fn=small_steps, scale=Scaled()),
    "chain": _job(partition=Partition({"": SequentialChain()})),
    "hidden": _job(
        _normed, partition=Partition({"": Hidden("0", "3", norms=["1", "2"])}), samples=4
    ),
    "norms": _job(_normed, optimizer_fn=adam, samples=4),
    "attention": _job(_attentive, small_steps, Partition(OF_ATTENTION, seed=3), scale=Averaged()),
}

# The same, saved with checksums.
OF_FORMAT_2 = ["carry-adam", "central"]
JOBS |= {f"format-2-{name}": JOBS[name] for name in OF_FORMAT_2}
