"""The systems that are compared, each a way to train a pipeline, and how they take turns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness.turns import Training, time_blocks
from benchmarks.pipeline.models import Model

ADAMW = "torch.optim.AdamW"  # torch's fastest on the CPU
WARM_UP = 2  # steps: the first connects, and may infer shapes


class System(Protocol):
    """Protocol of a way to train a pipeline.

    A step of its training returns the mean loss on the last stage's rank; ``weight_copies()`` the
    peak weight copies of each stage of this rank, if they are counted; ``actions(steps)`` the
    actions of all ranks in so many steps, and those that flush.
    """

    name: str

    def start(self, model: Model, num_microbatches: int) -> Training:
        """Start training on this rank."""


@dataclass(frozen=True)
class Plan:
    """The size of a measurement: in each turn, each system runs a block of steps."""

    turns: int
    microbatches: int  # of a timed block

    def steps(self, num_microbatches: int) -> int:
        return max(1, self.microbatches // num_microbatches)


def start(systems: Sequence[System], model: Model, num_microbatches: int) -> dict[str, Training]:
    """Start each system, and warm it up."""
    trainings = {system.name: system.start(model, num_microbatches) for system in systems}
    for training in trainings.values():
        for _ in range(WARM_UP):
            training.step()
        training.finish()
    return trainings


def time_steps(
    trainings: dict[str, Training], num_microbatches: int, plan: Plan
) -> dict[str, list[float]]:
    return time_blocks(trainings, plan.turns, plan.steps(num_microbatches))


def time_microbatches(
    trainings: dict[str, Training], num_microbatches: int, plan: Plan
) -> dict[str, list[float]]:
    found = time_steps(trainings, num_microbatches, plan)
    return {name: [each / num_microbatches for each in times] for name, times in found.items()}


def make_optimizer(parameters: Iterable[nn.Parameter], kind: str = ADAMW) -> torch.optim.Optimizer:
    """Return a fused AdamW; ``kind``: the class, of torch's arguments."""
    return resolve_name(kind)(parameters, lr=1e-4, weight_decay=0.01, fused=True)


def copies_by_stage(pipeline: Any) -> list[int]:
    """Return the weight copies of all stages, which are on ranks in turn."""
    of_ranks: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, pipeline.weight_copies())
    return [copies for chunk in zip(*of_ranks, strict=True) for copies in chunk]
