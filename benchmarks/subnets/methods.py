"""The data-parallel methods that compare.py compares, and with what they train."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.gossip.trainers import bf16_unchecked
from benchmarks.subnets.tasks import Bytes, Digits, Task
from pyparallel import GossipDataParallel, subnets
from pyparallel.gossip import LocalSGD

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Training:
    """One method on one rank."""

    forward: Callable[[Tensor], Tensor]
    optimizer: Optimizer
    # Holds the full model with all training so far; all ranks enter it together
    full_model: Callable[[], AbstractContextManager[nn.Module]]
    # Returns the weights and optimizer state that this rank holds between two steps; the
    # own state of a gossip algorithm is not counted
    held: Callable[[], Any]


def states_of(*owners: Any) -> Callable[[], Any]:
    return lambda: [owner.state_dict() for owner in owners]


@dataclass(frozen=True)
class Method:
    """A training method: immutable, with a complete ``repr``; all ranks call its ``start``."""

    name: str = field(default="", repr=False, kw_only=True)


@dataclass(frozen=True)
class DataParallel(Method):
    """DistributedDataParallel."""

    hook: Callable[..., Any] | None = field(default=None, repr=False)

    def start(self, task: Task, make_optimizer: MakeOptimizer) -> Training:
        ddp = DistributedDataParallel(task.build(), gradient_as_bucket_view=True)
        if self.hook:
            ddp.register_comm_hook(None, self.hook)
        optimizer = make_optimizer(list(ddp.parameters()))
        whole = nullcontext(ddp.module)
        return Training(ddp, optimizer, lambda: whole, states_of(ddp.module, optimizer))


@dataclass(frozen=True)
class LocalSteps(Method):
    """pyparallel's LocalSGD: exact averaging of the full model every ``interval`` steps."""

    interval: int

    def start(self, task: Task, make_optimizer: MakeOptimizer) -> Training:
        module = task.build()
        optimizer = make_optimizer(list(module.parameters()))
        model = GossipDataParallel(module, optimizer, LocalSGD(self.interval))
        return Training(model, optimizer, model.consensus, states_of(model, optimizer))


@dataclass(frozen=True)
class Subnets(Method):
    """SubnetTrainer."""

    interval: int
    scale: subnets.Scale = field(default_factory=subnets.Unscaled)
    optimizer_state: subnets.OptimizerState = field(default_factory=subnets.CarryState)
    copies: int = 1

    def start(self, task: Task, make_optimizer: MakeOptimizer) -> Training:
        module, partition = task.build(), replace(task.partition(), copies=self.copies)
        num_subnets = dist.get_world_size() // self.copies
        subnets.shrink_consumers(module, partition, self.scale.enlargement(num_subnets))
        trainer = subnets.SubnetTrainer(
            module,
            make_optimizer,
            partition,
            self.interval,
            scale=self.scale,
            optimizer_state=self.optimizer_state,
        )

        def held() -> Any:
            state = trainer.state_dict()
            return [state[part] for part in ("shards", "subnet", "optimizer")]

        return Training(trainer, trainer.optimizer, trainer.full_model, held)


DDP = DataParallel(name="DDP")
DDP_BF16 = DataParallel(bf16_unchecked, name="DDP, bf16 hook")  # the fair baseline on slow links


@dataclass(frozen=True)
class SGD:
    """SGD with Nesterov momentum."""

    lr: float
    momentum: float = 0.9

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(
            parameters, self.lr, momentum=self.momentum, nesterov=self.momentum > 0
        )


@dataclass(frozen=True)
class AdamW:
    """AdamW with torch's defaults except the learning rate."""

    lr: float

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(parameters, self.lr)


@dataclass(frozen=True)
class Entry:
    """One line of the table: a task, a method, an optimizer and its learning rate."""

    task: Task
    method: Method
    make_optimizer: MakeOptimizer

    @property
    def options(self) -> str:
        return f"{self.method!r}, {self.make_optimizer!r}"


INTERVAL = 20
# Learning rates are the best for seed 0, out of 0.03, 0.1 and 0.3 and of 0.003 and 0.01. On digits
# all three are equally good for SubnetTrainer, and for LocalSGD the smaller is no better: both use
# DDP's.
DIGITS = tuple(
    Entry(Digits(), method, SGD(0.1))
    for method in (
        DDP,
        DDP_BF16,
        LocalSteps(INTERVAL, name="LocalSGD"),
        Subnets(INTERVAL, name="SubnetTrainer"),
    )
)
BYTES = tuple(
    Entry(Bytes(), method, AdamW(3e-3))
    for method in (
        DDP,
        Subnets(INTERVAL, name="SubnetTrainer"),
        Subnets(INTERVAL, subnets.Averaged(), name="SubnetTrainer, averaged"),
    )
)
# By updates instead of seconds: each hidden unit and head has 1, 2 or all 4 ranks.
COPIES = tuple(
    Entry(Bytes(), method, AdamW(3e-3))
    for method in (
        DDP,
        Subnets(INTERVAL, subnets.Averaged(), name="SubnetTrainer, averaged"),
        Subnets(INTERVAL, subnets.Averaged(), copies=2, name="SubnetTrainer, 2 copies"),
        Subnets(INTERVAL, subnets.Averaged(), copies=4, name="SubnetTrainer, 4 copies"),
    )
)
