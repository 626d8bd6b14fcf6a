"""The protocols of the systems that are compared."""

from collections.abc import Iterable, Sequence
from pkgutil import resolve_name
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.pipeline.models import Model
from pyparallel.pipeline import Action

ADAMW = "torch.optim.AdamW"  # torch's fastest on the CPU


class Training(Protocol):
    """Protocol of one system on one rank."""

    def step(self) -> float | None:
        """Step; return the mean loss on the rank of the last stage, else None."""

    def finish(self) -> None:
        """Flush the pipeline, if there is one; all ranks must call it."""


class Pipeline(Training, Protocol):
    """Protocol of a pipeline on one rank."""

    def weight_copies(self) -> list[int]:
        """Return the peak weight copies of each stage of this rank; empty: not counted."""

    def actions(self, steps: int) -> Sequence[Sequence[Action]]:
        """Return the actions of all ranks in ``steps`` steps, and those that flush."""


class System(Protocol):
    """Protocol of a way to train a pipeline."""

    @property
    def name(self) -> str:
        """Return the name in tables."""

    def start(self, model: Model, num_microbatches: int) -> Training:
        """Start training on this rank."""


def make_optimizer(parameters: Iterable[nn.Parameter], kind: str = ADAMW) -> torch.optim.Optimizer:
    """Return a fused AdamW; ``kind``: the class, of torch's arguments."""
    optimizer: torch.optim.Optimizer = resolve_name(kind)(
        parameters, lr=1e-4, weight_decay=0.01, fused=True
    )
    return optimizer


def copies_by_stage(pipeline: Pipeline) -> list[int]:
    """Return the weight copies of all stages, which are on ranks in turn."""
    of_ranks: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, pipeline.weight_copies())
    return [copies for chunk in zip(*of_ranks, strict=True) for copies in chunk]
