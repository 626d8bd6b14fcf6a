"""A run of DistributedDataParallel with a compressor: its losses, score and bytes sent."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.compression.tasks import fitted
from benchmarks.harness.learning_rate import rate as rate_at
from benchmarks.harness.learning_rate import set_rate
from benchmarks.pipeline.tasks import Task
from pyparallel.compression import Compressor, GradientCompression, ddp_hook


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Args:
        losses: of every rank, by step, in nats.
        score: accuracy if the task has one, else the held-out loss in the task's unit.
        dense_bytes: of the gradients of a step in float32.
        payload_bytes: mean bytes of a rank's messages in a step.
        wire_bytes: mean bytes a rank sends in a step.
        residual_norm: norm of rank 0's residual at the end.
    """

    losses: list[list[float]]
    score: float
    dense_bytes: int
    payload_bytes: float
    wire_bytes: float
    residual_norm: float


def train(task: Task, compressor: Compressor | None, seed: int, updates: int) -> Outcome:
    """Train on all ranks; batches and initial weights depend on the seed alone.

    Without a compressor DistributedDataParallel itself averages.
    """
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(task.build())
    compressor, make_optimizer = fitted(task, compressor)
    optimizer = make_optimizer(ddp.parameters(), lr=task.main_rate)
    traffic = Traffic(ddp, compressor)
    losses = []
    for update, (inputs, target) in enumerate(itertools.islice(shares(task, seed), updates)):
        set_rate([optimizer], task.main_rate * rate_at(update, updates))
        optimizer.zero_grad()
        loss = task.loss(ddp(inputs), target)
        loss.backward()
        traffic.count()
        optimizer.step()
        losses.append(loss.item())
    return Outcome(
        of_all_ranks(losses),
        score(task, ddp.module) if dist.get_rank() == 0 else 0.0,
        traffic.dense_bytes,
        traffic.payload_bytes / updates,
        traffic.wire_bytes / updates,
        traffic.residual_norm,
    )


def shares(task: Task, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's part of each batch."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for inputs, target in task.batches(seed):
        yield inputs.tensor_split(num_ranks)[rank], target.tensor_split(num_ranks)[rank]


class Traffic:
    """Attaches a compressor and sums the bytes of its steps."""

    def __init__(self, ddp: DistributedDataParallel, compressor: Compressor | None) -> None:
        self._compression: GradientCompression | None = None
        if compressor is not None:
            self._compression, hook = ddp_hook(compressor, ddp)
            ddp.register_comm_hook(self._compression, hook)
        self.dense_bytes = 4 * sum(p.numel() for p in ddp.parameters() if p.requires_grad)
        self.payload_bytes = 0.0
        self.wire_bytes = 0.0

    def count(self) -> None:
        """Count the step whose backward pass has ended."""
        if self._compression is None:
            self.payload_bytes += self.dense_bytes
            self.wire_bytes += dense_wire_bytes(self.dense_bytes, dist.get_world_size())
        else:
            self.payload_bytes += self._compression.last_step.payload_bytes
            self.wire_bytes += self._compression.last_step.wire_bytes

    @property
    def residual_norm(self) -> float:
        """Norm of this rank's residual."""
        return 0.0 if self._compression is None else self._compression.residual_norm


def dense_wire_bytes(num_bytes: int, num_ranks: int) -> float:
    """Return the bytes a rank sends in a ring all-reduce."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes


@torch.no_grad()
def score(task: Task, model: nn.Module) -> float:
    """Return the accuracy, or the loss in the task's unit."""
    accuracy = task.accuracy(model)
    if accuracy is not None:
        return accuracy
    inputs, target = task.held_out()
    parts = zip(inputs.split(128), target.split(128), strict=True)
    losses = [task.loss(model(x), y) * len(x) for x, y in parts]
    return task.units_per_nat * float(torch.stack(losses).sum()) / len(inputs)


def of_all_ranks(losses: list[float]) -> list[list[float]]:
    """Gather the losses by rank."""
    gathered: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, losses)
    return gathered
