"""The arguments of a pipeline's trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..compression import Compressor
from ..training import Algorithm
from .prediction.corrections import Correction
from .runtime.build_stage import OptimizerFactory
from .runtime.loss import Loss
from .runtime.loss_weights import LossWeightFn
from .runtime.stage import SchedulerFactory
from .schedules.schedule import Schedule
from .schedules.shape import PipelineShape


@dataclass(frozen=True)
class TrainerArguments:
    """What a ``PipelineTrainer`` was called with on a rank, not checked yet.

    ``compressors`` are those of activations, then of gradients, by the names of their arguments.
    """

    model: Any
    layers: list[nn.Module]
    split: Sequence[int] | None
    loss_fn: Loss
    optimizer_fn: OptimizerFactory
    schedule: Schedule
    num_stages: int
    num_microbatches: int
    num_ranks: int
    rank: int
    scheduler_fn: SchedulerFactory | None
    max_norm: float | None
    gradient_accumulation_steps: int
    grad_scaler: torch.amp.GradScaler | None
    correction: Correction | None
    compressors: Mapping[str, Compressor | None]
    nonfinite: str
    loss_weight_fn: LossWeightFn | None
    measure_gradient_norms: bool
    replicas: Algorithm | None = None  # the algorithm that averages them; None: there are none
    num_replicas: int = 1
    replica: int | None = None  # this rank's
    seed: int = field(default_factory=torch.initial_seed)  # of the stages' random numbers

    @property
    def place(self) -> str:
        """Return what errors begin with: where there are replicas, the one of this rank."""
        return "" if self.replica is None else f"replica {self.replica}, "

    @cached_property
    def shape(self) -> PipelineShape:
        """Return the numbers of stages, microbatches and ranks; a ValueError if they do not fit."""
        return PipelineShape(self.num_stages, self.num_microbatches, self.num_ranks)

    def fields(self) -> list[tuple[str, str]]:
        """Return what must be equal on all ranks, each value as a text."""
        return [
            ("schedule", repr(self.schedule)),
            ("num_microbatches", repr(self.num_microbatches)),
            ("number of layers", repr(len(self.layers))),
            ("max_norm", repr(self.max_norm)),
            ("gradient_accumulation_steps", repr(self.gradient_accumulation_steps)),
            ("grad_scaler", _describe_scaler(self.grad_scaler)),
            ("correction", repr(self.correction)),
            ("nonfinite", repr(self.nonfinite)),
            ("loss_weight_fn", "None" if self.loss_weight_fn is None else "a function"),
            ("split", repr(list(self.split) if isinstance(self.split, Sequence) else self.split)),
            *((f"replicas: {name}", value) for name, value in self._fields_of_replicas()),
            *((name, repr(each)) for name, each in self.compressors.items()),
        ]

    def _fields_of_replicas(self) -> list[tuple[str, str]]:
        return [] if self.replicas is None else list(self.replicas.config_fields())


def _describe_scaler(grad_scaler: torch.amp.GradScaler | None) -> str:
    """Return what ranks compare of a scaler; of another object, which is refused, its class."""
    if isinstance(grad_scaler, torch.amp.GradScaler):
        return repr(grad_scaler.state_dict())
    return type(grad_scaler).__name__
