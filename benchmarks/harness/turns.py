"""Measurements in turns: what is compared alternates within one run, in random order.

Machines drift by tens of percent between runs, so only ratios within a run are meaningful.
"""

import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

Name = TypeVar("Name", bound=Hashable)
Found = TypeVar("Found")


class Training(Protocol):
    """Protocol of a training on this rank that takes turns with others."""

    def step(self) -> object:
        """Take a step."""

    def finish(self) -> object:
        """Complete what is in flight; all ranks call it together."""


def take_turns(
    runs: Mapping[Name, Callable[[], Found]],
    turns: int,
    warm_up: int = 3,
    before: Callable[[], object] = lambda: None,
) -> dict[Name, list[Found]]:
    """Return what each run returns in every turn, without the first turns, which warm up.

    The order of a turn is random, and the same on all ranks; ``before``, such as a barrier, is
    called before each run.
    """
    found: dict[Name, list[Found]] = {name: [] for name in runs}
    order = random.Random(0)
    for turn in range(warm_up + turns):
        for name in order.sample(list(runs), len(runs)):
            before()
            result = runs[name]()
            if turn >= warm_up:
                found[name].append(result)
    return found


def timed(function: Callable[..., object], *arguments: Any) -> float:
    begin = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begin


def time_block(
    training: Training, steps: int, begin_timing: Callable[[], object] = lambda: None
) -> float:
    """Return the seconds per step in steady state, after one step that is not timed."""
    dist.barrier()
    training.step()
    begin_timing()
    begin = time.perf_counter()
    for _ in range(steps):
        training.step()
    elapsed = time.perf_counter() - begin
    training.finish()
    return elapsed / steps


def time_blocks(
    trainings: Mapping[Name, Training], turns: int, steps: int
) -> dict[Name, list[float]]:
    """Return the seconds per step of each training in every turn, on the slowest rank."""
    runs = {name: lambda each=each: time_block(each, steps) for name, each in trainings.items()}
    return slowest(take_turns(runs, turns, warm_up=0))


def slowest(seconds: Mapping[Name, Sequence[float]]) -> dict[Name, list[float]]:
    return {name: largest(times) for name, times in seconds.items()}


def largest(times: Sequence[float]) -> list[float]:
    """Return the elementwise maximum over ranks."""
    found = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()
