"""The data-parallel methods that compare.py compares."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

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
        """Run the forward pass."""

    def full_model(self) -> AbstractContextManager[nn.Module]:
        """Hold the full model with all training so far; all ranks enter it together."""

    def held(self) -> Any:
        """Return the weights and optimizer state that this rank holds between two steps."""


class Method(Protocol):
    """A training method: immutable, with a complete ``repr``."""

    name: str

    def start(self, task: Task, make_optimizer: MakeOptimizer) -> Training:
        """Set up training; all ranks call it."""


@dataclass(frozen=True)
class DataParallel(Method):
    """DistributedDataParallel."""

    name: str = field(default="DDP", repr=False)
    hook: Callable[..., Any] | None = field(default=None, repr=False)

    @override
    def start(self, task: Task, make_optimizer: MakeOptimizer) -> Training:
        ddp = DistributedDataParallel(task.build(), gradient_as_bucket_view=True)
        if self.hook:
            ddp.register_comm_hook(None, self.hook)
        return ReplicatedTraining(ddp, make_optimizer(list(ddp.parameters())), ddp.module)


class ReplicatedTraining(Training):
    """Training with the same full model on every rank."""

    def __init__(self, called: nn.Module, optimizer: Optimizer, module: nn.Module) -> None:
        self.optimizer = optimizer
        self._called, self._module = called, module

    @override
    def __call__(self, inputs: Tensor) -> Tensor:
        output: Tensor = self._called(inputs)
        return output

    @override
    def full_model(self) -> AbstractContextManager[nn.Module]:
        return nullcontext(self._module)

    @override
    def held(self) -> Any:
        return [self._module.state_dict(), self.optimizer.state_dict()]


@dataclass(frozen=True)
class LocalSteps(Method):
    """pyparallel's LocalSGD: exact averaging of the full model every ``interval`` steps."""

    interval: int
    name: str = field(default="LocalSGD", repr=False)

    @override
    def start(self, task: Task, make_optimizer: MakeOptimizer) -> Training:
        module = task.build()
        optimizer = make_optimizer(list(module.parameters()))
        return LocalTraining(
            GossipDataParallel(module, optimizer, LocalSGD(self.interval)), optimizer
        )


class LocalTraining(Training):
    """Training with a separate full model on every rank."""

    def __init__(self, model: GossipDataParallel, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._model = model

    @override
    def __call__(self, inputs: Tensor) -> Tensor:
        output: Tensor = self._model(inputs)
        return output

    @override
    def full_model(self) -> AbstractContextManager[nn.Module]:
        return self._model.consensus()

    @override
    def held(self) -> Any:
        """Return model and optimizer state; the algorithm's own state is not counted."""
        return [self._model.state_dict(), self.optimizer.state_dict()]


@dataclass(frozen=True)
class Subnets(Method):
    """SubnetTrainer."""

    interval: int
    scale: Scale = field(default_factory=Unscaled)
    optimizer_state: OptimizerState = field(default_factory=CarryState)
    name: str = field(default="SubnetTrainer", repr=False)

    @override
    def start(self, task: Task, make_optimizer: MakeOptimizer) -> Training:
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
        return SubnetTraining(trainer)


class SubnetTraining(Training):
    """Training with a subnet and rows of the full model on every rank."""

    def __init__(self, trainer: SubnetTrainer) -> None:
        self.optimizer = trainer.optimizer
        self._trainer = trainer

    @override
    def __call__(self, inputs: Tensor) -> Tensor:
        output: Tensor = self._trainer(inputs)
        return output

    @override
    def full_model(self) -> AbstractContextManager[nn.Module]:
        return self._trainer.full_model()

    @override
    def held(self) -> Any:
        state = self._trainer.state_dict()
        return [state[part] for part in ("whole", "subnet", "optimizer")]


def ddp_bf16() -> DataParallel:
    """Return DDP with bfloat16 gradients, the fair baseline on slow links."""
    return DataParallel("DDP, bf16 hook", bf16_unchecked)
