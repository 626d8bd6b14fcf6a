"""One time-limited run: the full model's score over seconds and bytes."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.link import read_sent
from benchmarks.harness.turns import largest
from benchmarks.subnets.methods import MakeOptimizer, Method, Training
from benchmarks.subnets.tasks import Batch, Task
from pyparallel.subnets import recalibrate


@dataclass(frozen=True)
class TimeBudget:
    """The training time of a run.

    Args:
        seconds: seconds of training; evaluations do not count.
        every: seconds between two evaluations, fewer at first.
    """

    seconds: float
    every: float


@dataclass(frozen=True)
class Point:
    """One evaluation, on one rank.

    Args:
        seconds: seconds of training so far, the same on all ranks.
        sent: bytes sent over this rank's link so far, including headers.
        score: score of the full model, on rank 0; 0 elsewhere.
    """

    seconds: float
    steps: int
    sent: int
    score: float


@dataclass(frozen=True)
class Run:
    """The result of one rank.

    Args:
        held_bytes: weights, running statistics and optimizer state between two steps, at the end.
    """

    points: list[Point]
    held_bytes: int


def race(
    rank: int,
    task: Task,
    method: Method,
    make_optimizer: MakeOptimizer,
    seed: int,
    budget: TimeBudget,
) -> Run:
    """Train with a method until the time is over; all ranks take equally many steps."""
    torch.manual_seed(seed)
    training = method.start(task, make_optimizer)
    batches = task.batches(seed)
    points = [Point(0.0, 0, 0, measure(task, training))]
    due = 1
    while due:
        elapsed, sent = advance(task, training, batches, due)
        last = points[-1]
        seconds, steps = last.seconds + elapsed, last.steps + due
        points.append(Point(seconds, steps, last.sent + sent, measure(task, training)))
        due = steps_due(due, elapsed, budget.seconds - seconds, budget.every)
    return Run(points, count_bytes(training.held()))


def steps_due(done: int, elapsed: float, left: float, every: float) -> int:
    """Return the steps until the next evaluation: at most three times as many; 0 at the end."""
    per_step = elapsed / done
    last = round(left / per_step)
    if left < 0.01 * every or last < 1:
        return 0
    return min(last, max(1, min(3 * done, round(every / per_step))))


def advance(
    task: Task, training: Training, batches: Iterator[Batch], steps: int
) -> tuple[float, int]:
    """Take this many steps; return the slowest rank's seconds and this rank's bytes sent."""
    dist.barrier()
    before, begin = read_sent(), time.perf_counter()
    for _ in range(steps):
        inputs, target = next(batches)
        training.optimizer.zero_grad()
        task.loss(training.forward(inputs), target).backward()
        training.optimizer.step()
    elapsed, sent = time.perf_counter() - begin, read_sent() - before
    return largest([elapsed])[0], sent


@torch.no_grad()
def measure(task: Task, training: Training) -> float:
    """Return the score of the full model with recalibrated running statistics."""
    with training.full_model() as module:
        recalibrate(module, task.calibration())
        was_training = module.training
        module.eval()
        score = task.score(module) if dist.get_rank() == 0 else 0.0
        module.train(was_training)
    return score


def count_bytes(held: Any) -> int:
    if isinstance(held, Tensor):
        return held.nbytes
    if isinstance(held, dict):
        held = list(held.values())
    return sum(map(count_bytes, held)) if isinstance(held, list | tuple) else 0
