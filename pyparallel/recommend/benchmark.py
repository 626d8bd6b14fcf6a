"""The measurements behind a recommendation: compute, link and compressors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from .candidates import CANDIDATES
from .link import max_over_ranks, measure_link
from .model import Compute, Cost, Link, StepTime, predict
from .profile import profile
from .workload import Workload

_RANK_DEPENDENT_COSTS = ("coding", "payload_bytes", "wire_bytes")
_Measured = TypeVar("_Measured", Compute, Cost)
Progress = Callable[[int, int, str], None]
"""Called before each measurement: its number, how many there are, and what is measured."""


@dataclass(frozen=True)
class Measurements:
    """What is measured for a recommendation, or given as the link; costs are of ``CANDIDATES``."""

    compute: Compute
    link: Link
    costs: Sequence[Cost]

    @property
    def predictions(self) -> list[StepTime]:
        """Return the predicted step time of each candidate."""
        return [predict(cost, self.compute, self.link) for cost in self.costs]


def benchmark(workload: Workload, link: Link, progress: Progress = lambda *_: None) -> Measurements:
    """Measure the compute and the candidates on this machine, for a given link."""
    total = 1 + len(CANDIDATES)
    progress(1, total, "forward and backward")
    compute = workload.measure()
    buckets, costs = workload.buckets, []
    for step, candidate in enumerate(CANDIDATES, start=2):
        progress(step, total, candidate.name)
        costs.append(profile(candidate, buckets, link.num_ranks))
    return Measurements(compute, link, costs)


def benchmark_ranks(
    workload: Workload, device: torch.device, progress: Progress = lambda *_: None
) -> Measurements:
    """Measure also the link of the default group; the maximum over ranks, all of which call it."""
    local = benchmark(workload, measure_link(device), progress)
    return replace(
        local,
        compute=_max_over_ranks(local.compute, ("forward", "backward"), device),
        costs=[_max_over_ranks(cost, _RANK_DEPENDENT_COSTS, device) for cost in local.costs],
    )


def _max_over_ranks(local: _Measured, names: Sequence[str], device: torch.device) -> _Measured:
    maxima = max_over_ranks([getattr(local, name) for name in names], device)
    changes: dict[str, Any] = dict(zip(names, maxima, strict=True))
    return replace(local, **changes)
