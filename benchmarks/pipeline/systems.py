"""What all systems that are compared have in common."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.pipeline.models import Model
from pyparallel.pipeline import Action


class Training(Protocol):
    """One system on one rank."""

    def step(self) -> float | None:
        """One call of the pipe: the mean loss on the rank of the last stage, else None."""

    def finish(self) -> None:
        """Empty the pipe, where there is one; all ranks together."""


class Pipeline(Training, Protocol):
    """One system on one rank that hands microbatches from stage to stage."""

    def weight_copies(self) -> list[int]:
        """The most weights that each stage of this rank has held at once; empty: not counted."""

    def actions(self, calls: int) -> Sequence[Sequence[Action]]:
        """What every rank does in so many calls, from an empty pipe to an empty pipe."""


class System(Protocol):
    """A way to train a pipeline."""

    @property
    def name(self) -> str:
        """As it stands in the table."""

    def start(self, model: Model, num_microbatches: int) -> Training:
        """Begin on this rank."""


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The fastest AdamW that torch has on the CPU, so that no system waits for another one's."""
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, fused=True)


def copies_by_stage(pipeline: Pipeline) -> list[int]:
    """Of all ranks, which hold stages in turn."""
    of_ranks: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, pipeline.weight_copies())
    return [copies for one_of_each in zip(*of_ranks, strict=True) for copies in one_of_each]
