"""What a process holds while it takes many steps, and whether that grows."""

import gc
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

NUM_SAMPLES = 60
WARM_UP = 0.4  # of the steps: caches fill, buckets are rebuilt, arenas of malloc settle
BOUND_KB = 100.0  # of growth in 1,000 steps: 0.1 kB a step
SHORTEST = 1000  # steps after the warm-up that a rate of growth needs


@dataclass(frozen=True)
class Sample:
    """What a process holds before a step: resident memory in kB, file descriptors and threads."""

    step: int
    rss_kb: int
    fds: int
    threads: int


@dataclass(frozen=True)
class Report:
    """Samples after the warm-up, early and late, and what is wrong with them."""

    early: Sample
    late: Sample
    # Of resident memory in 1,000 steps: the smaller slope of the lines fitted to both
    # halves of the samples, so that a single jump is none; None: there were too few steps
    growth_kb: float | None
    problems: tuple[str, ...]  # what grows; empty if nothing does


def watch(step: Callable[[int], object], steps: int) -> list[Sample]:
    """Call ``step(index)`` for each index below ``steps``; return samples, evenly spaced."""
    gc.collect()
    gc.freeze()  # collections are fast: what exists now is not looked at again
    samples = []
    for index in range(steps):
        if index * NUM_SAMPLES // steps != (index - 1) * NUM_SAMPLES // steps:
            samples.append(take_sample(index))
        step(index)
    return [*samples, take_sample(steps)]


def take_sample(step: int) -> Sample:
    """Return what this process holds, without garbage."""
    gc.collect()
    # Not /proc/self/statm, whose counters lag behind by tens of pages.
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    rss_kb = next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))
    fds, threads = (len(os.listdir(f"/proc/self/{each}")) for each in ("fd", "task"))
    return Sample(step, rss_kb, fds, threads)


def judge(samples: Sequence[Sample], slack: int = 0) -> Report:
    """Return the report of samples of one process.

    After the warm-up, file descriptors and threads must not become more, but for ``slack`` (medians
    of the first and the last third), and resident memory must grow by less than ``BOUND_KB`` in
    1,000 steps.
    """
    steps = samples[-1].step
    kept = [each for each in samples if each.step >= WARM_UP * steps]
    third = max(1, len(kept) // 3)
    early, late = _median(kept[:third]), _median(kept[-third:])
    problems = [
        f"{name} grew from {getattr(early, name)} to {getattr(late, name)}"
        for name in ("fds", "threads")
        if getattr(late, name) > getattr(early, name) + slack
    ]
    growth = None
    if kept[-1].step - kept[0].step >= SHORTEST:
        middle = len(kept) // 2
        growth = 1000 * min(_slope(kept[:middle]), _slope(kept[middle:]))
        if growth > BOUND_KB:
            problems.append(f"memory grew by {growth:.0f} kB in 1,000 steps")
    return Report(early, late, growth, tuple(problems))


def _slope(samples: Sequence[Sample]) -> float:
    return statistics.linear_regression(
        [each.step for each in samples], [each.rss_kb for each in samples]
    ).slope


def _median(samples: Sequence[Sample]) -> Sample:
    names = ("step", "rss_kb", "fds", "threads")
    return Sample(*(statistics.median_high([getattr(s, name) for s in samples]) for name in names))
