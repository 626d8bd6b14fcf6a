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
from benchmarks.pipeline.tasks import Bytes, Digits
from pyparallel.compression import CommStats, Compressor, ddp_hook


@dataclass(frozen=True)
class Outcome:
    """Result of a run on one rank.

    Args:
        losses: by step, in nats.
        score: accuracy if the task has one, else the held-out loss in the task's unit; of rank 0.
        dense_bytes: of the gradients of a step in float32.
        payload_bytes: mean bytes of a rank's messages in a step.
        wire_bytes: mean bytes a rank sends in a step.
        residual_norm: norm of the rank's residual at the end.
    """

    losses: list[float]
    score: float
    dense_bytes: int
    payload_bytes: float
    wire_bytes: float
    residual_norm: float


def train(
    rank: int, task: Digits | Bytes, compressor: Compressor | None, seed: int, updates: int
) -> Outcome:
    """Train on all ranks; batches and initial weights depend on the seed alone.

    Without a compressor DistributedDataParallel itself averages.
    """
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(task.build())
    compressor, make_optimizer = fitted(task, compressor)
    optimizer = make_optimizer(ddp.parameters(), lr=task.main_rate)
    dense, compression = dense_step(ddp), None
    if compressor is not None:
        compression, hook = ddp_hook(compressor, ddp)
        ddp.register_comm_hook(compression, hook)
    losses, sent = [], []
    for update, (inputs, target) in enumerate(itertools.islice(shares(task, seed), updates)):
        set_rate([optimizer], task.main_rate * rate_at(update, updates))
        optimizer.zero_grad()
        loss = task.loss(ddp(inputs), target)
        loss.backward()
        sent.append(compression.last_step if compression else dense)
        optimizer.step()
        losses.append(loss.item())
    return Outcome(
        losses,
        score(task, ddp.module) if rank == 0 else 0.0,
        dense.payload_bytes,
        sum(step.payload_bytes for step in sent) / updates,
        sum(step.wire_bytes for step in sent) / updates,
        compression.residual_norm if compression else 0.0,
    )


def shares(task: Digits | Bytes, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for inputs, target in task.batches(seed):
        yield inputs.tensor_split(num_ranks)[rank], target.tensor_split(num_ranks)[rank]


def dense_step(module: nn.Module) -> CommStats:
    """Return the bytes of a step of DistributedDataParallel alone."""
    num_bytes = 4 * sum(p.numel() for p in module.parameters() if p.requires_grad)
    return CommStats(num_bytes, dense_wire_bytes(num_bytes, dist.get_world_size()))


def dense_wire_bytes(num_bytes: int, num_ranks: int) -> float:
    """Return the bytes a rank sends in a ring all-reduce."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes


@torch.no_grad()
def score(task: Digits | Bytes, model: nn.Module) -> float:
    accuracy = task.accuracy(model)
    if accuracy is not None:
        return accuracy
    inputs, target = task.held_out()
    parts = zip(inputs.split(128), target.split(128), strict=True)
    losses = [task.loss(model(x), y) * len(x) for x, y in parts]
    return task.units_per_nat * float(torch.stack(losses).sum()) / len(inputs)
