"""The ways to train on several ranks that compare_subnets.py compares."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.compression.systems import bf16_unchecked
from benchmarks.subnets.tasks import Task
from pyparallel import GossipDataParallel
from pyparallel.gossip import LocalSGD
from pyparallel.subnets import (
    CarryState,
    OptimizerState,
    Scale,
    SubnetTrainer,
    Unscaled,
    shrink_consumers,
)

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


class Training(Protocol):
    """One method on one rank."""

    optimizer: Optimizer

    def __call__(self, inputs: Tensor) -> Tensor:
        """Forward."""

    def whole(self) -> AbstractContextManager[nn.Module]:
        """The whole model, with all that was learned; all ranks together."""

    def held(self) -> Any:
        """Weights and optimizer state that this rank holds between two steps."""


class Method(Protocol):
    """A way to train: an immutable object whose ``repr`` says all of it."""

    name: str

    def start(self, task: Task, make_optimizer: MakeOptimizer) -> Training:
        """Begin, on all ranks."""


@dataclass(frozen=True)
class DataParallel:
    """DistributedDataParallel."""

    name: str = field(default="DDP", repr=False)
    hook: Callable[..., Any] | None = field(default=None, repr=False)

    def start(self, task: Task, make_optimizer: MakeOptimizer) -> Training:
        """Begin, on all ranks."""
        ddp = DistributedDataParallel(task.build(), gradient_as_bucket_view=True)
        if self.hook:
            ddp.register_comm_hook(None, self.hook)
        return Replicated(ddp, make_optimizer(list(ddp.parameters())), ddp.module)


class Replicated:
    """Every rank has the whole model, and the same."""

    def __init__(self, called: nn.Module, optimizer: Optimizer, module: nn.Module) -> None:
        self.optimizer = optimizer
        self._called, self._module = called, module

    def __call__(self, inputs: Tensor) -> Tensor:
        """Forward."""
        output: Tensor = self._called(inputs)
        return output

    def whole(self) -> AbstractContextManager[nn.Module]:
        """The module."""
        return nullcontext(self._module)

    def held(self) -> Any:
        """All of it."""
        return [self._module.state_dict(), self.optimizer.state_dict()]


@dataclass(frozen=True)
class LocalSteps:
    """pyparallel's LocalSGD: the exact average of the whole model every so many steps."""

    interval: int
    name: str = field(default="LocalSGD", repr=False)

    def start(self, task: Task, make_optimizer: MakeOptimizer) -> Training:
        """Begin, on all ranks."""
        module = task.build()
        optimizer = make_optimizer(list(module.parameters()))
        return Local(GossipDataParallel(module, optimizer, LocalSGD(self.interval)), optimizer)


class Local:
    """Every rank has a whole model of its own."""

    def __init__(self, model: GossipDataParallel, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._model = model

    def __call__(self, inputs: Tensor) -> Tensor:
        """Forward."""
        output: Tensor = self._model(inputs)
        return output

    def whole(self) -> AbstractContextManager[nn.Module]:
        """The average."""
        return self._model.consensus()

    def held(self) -> Any:
        """All of it; what the algorithm may hold besides is not counted."""
        return [self._model.state_dict(), self.optimizer.state_dict()]


@dataclass(frozen=True)
class Subnets:
    """SubnetTrainer."""

    interval: int
    scale: Scale = field(default_factory=Unscaled)
    optimizer_state: OptimizerState = field(default_factory=CarryState)
    name: str = field(default="SubnetTrainer", repr=False)

    def start(self, task: Task, make_optimizer: MakeOptimizer) -> Training:
        """Begin, on all ranks."""
        module, partition = task.build(), task.partition()
        shrink_consumers(module, partition, self.scale.enlargement(dist.get_world_size()))
        trainer = SubnetTrainer(
            module,
            make_optimizer,
            partition,
            self.interval,
            scale=self.scale,
            optimizer_state=self.optimizer_state,
        )
        return Parts(trainer)


class Parts:
    """Every rank has a subnet, and rows of the whole."""

    def __init__(self, trainer: SubnetTrainer) -> None:
        self.optimizer = trainer.optimizer
        self._trainer = trainer

    def __call__(self, inputs: Tensor) -> Tensor:
        """Forward."""
        output: Tensor = self._trainer(inputs)
        return output

    def whole(self) -> AbstractContextManager[nn.Module]:
        """All subnets together."""
        return self._trainer.full_model()

    def held(self) -> Any:
        """The subnet and the rows, with the state of both."""
        state = self._trainer.state_dict()
        return [state[part] for part in ("whole", "subnet", "optimizer")]


def halved() -> DataParallel:
    """Gradients in bfloat16 on their way: the honest baseline, where links are slow."""
    return DataParallel("DDP, bf16 hook", bf16_unchecked)
