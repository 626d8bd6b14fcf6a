"""The measurements behind a recommendation: compute, link and compressors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from .candidates import CANDIDATES, OUTER_STEPS, Candidate
from .link import max_over_ranks, measure_link
from .model import Compute, Cost, Link, StepTime, predict, predict_outer
from .profile import profile
from .workload import Workload

_RANK_DEPENDENT_COSTS = ("coding", "payload_bytes", "wire_bytes")
_Measured = TypeVar("_Measured", Compute, Cost)
Progress = Callable[[int, int, str], None]
"""Called before each measurement: its number, how many there are, and what is measured."""


@dataclass(frozen=True)
class Measurements:
    """What is measured, or given, for a recommendation.

    The link may be given; costs are one for each of ``CANDIDATES``, and of ``OUTER_STEPS``.
    """

    compute: Compute
    link: Link
    costs: Sequence[Cost]
    outer_costs: Sequence[Cost]

    @property
    def predictions(self) -> list[StepTime]:
        """Return the predicted step time of each candidate."""
        return [predict(cost, self.compute, self.link) for cost in self.costs]

    @property
    def outer_predictions(self) -> list[StepTime]:
        """Return the predicted mean time of a local step with each kind of outer steps."""
        return [
            predict_outer(
                cost,
                self.compute,
                self.link,
                interval=each.interval,
                fragments=each.num_fragments,
                delay=each.delay,
            )
            for cost, each in zip(self.outer_costs, OUTER_STEPS, strict=True)
        ]


def benchmark(workload: Workload, link: Link, progress: Progress = lambda *_: None) -> Measurements:
    """Measure the compute and the candidates on this machine, for a given link."""
    outer = [Candidate(type(each).__name__, each.compressor) for each in OUTER_STEPS]
    total = 1 + len(CANDIDATES) + len(outer)
    progress(1, total, "forward and backward")
    compute = workload.measure()
    buckets, costs = workload.buckets, []
    for step, candidate in enumerate((*CANDIDATES, *outer), start=2):
        progress(step, total, candidate.name)
        costs.append(profile(candidate, buckets, link.num_ranks))
    return Measurements(compute, link, costs[: len(CANDIDATES)], costs[len(CANDIDATES) :])


def benchmark_ranks(
    workload: Workload, device: torch.device, progress: Progress = lambda *_: None
) -> Measurements:
    """Measure also the link of the default group; the maximum over ranks, all of which call it."""
    local = benchmark(workload, measure_link(device), progress)
    return replace(
        local,
        compute=_max_over_ranks(local.compute, ("forward", "backward"), device),
        costs=[_max_over_ranks(cost, _RANK_DEPENDENT_COSTS, device) for cost in local.costs],
        outer_costs=[
            _max_over_ranks(cost, _RANK_DEPENDENT_COSTS, device) for cost in local.outer_costs
        ],
    )


def _max_over_ranks(local: _Measured, names: Sequence[str], device: torch.device) -> _Measured:
    maxima = max_over_ranks([getattr(local, name) for name in names], device)
    changes: dict[str, Any] = dict(zip(names, maxima, strict=True))
    return replace(local, **changes)
