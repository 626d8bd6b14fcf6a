"""The tasks of compare.py, and a run of DistributedDataParallel with a compressor.

Data and models are those of the pipeline benchmarks, not partitioned.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.learning_rate import rate as rate_at
from benchmarks.harness.learning_rate import set_rate
from benchmarks.pipeline.tasks import Bytes, Digits, MakeOptimizer
from pyparallel.compression import (
    DGC,
    Cast,
    Chain,
    CommStats,
    Compressor,
    ErrorFeedback,
    Int8,
    Learned,
    PermK,
    PowerSGD,
    RandomK,
    Sign,
    Switch,
    Ternary,
    TopK,
    compress_ddp,
)
from pyparallel.planning.recommend import CANDIDATES, Candidate

WARM_UP = 500  # steps, a third: AdamW divides by gradient statistics of the first steps


def _after_bf16(compressor: Compressor, steps: int = WARM_UP) -> Compressor:
    return Switch({0: Cast(), steps: compressor})


TASKS = (
    Digits(
        "digits",
        partial(torch.optim.SGD, momentum=0.9),
        rates=(0.04,),
        main_rate=0.04,
        batch_size=64,
        updates=900,
    ),
    Bytes(
        "text",
        torch.optim.AdamW,
        rates=(6e-3,),
        main_rate=6e-3,
        batch_size=8,
        context=64,
        width=32,
        updates=1500,
    ),
)

# Aggressive compressors need a warm-up with an optimizer that adapts to every entry.
WARMED = (
    Candidate("sign-ef-warmed", _after_bf16(ErrorFeedback(Sign(block_size=64)))),
    Candidate("ternary-ef-warmed", _after_bf16(ErrorFeedback(Ternary(block_size=32)))),
    Candidate("topk-ef-warmed", _after_bf16(ErrorFeedback(TopK(0.05)))),
    Candidate("topk-int8-ef-warmed", _after_bf16(ErrorFeedback(Chain(TopK(0.05), Int8())))),
    Candidate("randomk-ef-warmed", _after_bf16(ErrorFeedback(RandomK(0.25)), 750)),
    Candidate("permk-ef-warmed", _after_bf16(ErrorFeedback(PermK()), 750)),
    Candidate("powersgd-ef-warmed", _after_bf16(ErrorFeedback(PowerSGD()))),
    Candidate("dgc-warmed", DGC(0.05, warm_up=WARM_UP)),
    Candidate(
        "learned-ef-warmed", ErrorFeedback(Learned(0.05, dense_steps=750, learning_steps=300))
    ),
)

# A block that spans several parameters has a scale that suits none of them.
IN_SMALL_BLOCKS = (Candidate("sign-64-ef", ErrorFeedback(Sign(block_size=64))),)


def candidates_of(task: Digits | Bytes) -> tuple[Candidate, ...]:
    return CANDIDATES + (WARMED if isinstance(task, Bytes) else IN_SMALL_BLOCKS)


def fitted(
    task: Digits | Bytes, compressor: Compressor | None
) -> tuple[Compressor | None, MakeOptimizer]:
    """Return compressor and optimizer: DGC takes over the momentum of SGD, of no other."""
    if not isinstance(compressor, DGC):
        return compressor, task.make_optimizer
    if isinstance(task.make_optimizer, partial) and "momentum" in task.make_optimizer.keywords:
        kept = task.make_optimizer.keywords["momentum"]
        return replace(compressor, momentum=kept), partial(task.make_optimizer, momentum=0.0)
    return replace(compressor, momentum=0.0), task.make_optimizer


@dataclass(frozen=True)
class Outcome:
    """Result of a run on one rank."""

    losses: list[float]  # by step, in nats
    # Accuracy if the task has one, else the held-out loss in the task's unit; of rank 0
    score: float
    dense_bytes: int  # of the gradients of a step in float32
    payload_bytes: float  # mean bytes of a rank's messages in a step
    wire_bytes: float  # mean bytes a rank sends in a step
    residual_norm: float  # norm of the rank's residual at the end


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
        compression = compress_ddp(ddp, compressor)
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
