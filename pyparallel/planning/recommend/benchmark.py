"""The measurements behind a recommendation: compute, link and compressors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

from ...gossip import SGP, Algorithm, AllReduce, DiLoCo
from ..simulate import Cost, Profile, Stragglers
from .candidates import CANDIDATES, OUTER_STEPS, Candidate
from .link import max_over_ranks, measure_link
from .model import Link, StepTime, predict
from .profile import profile
from .workload import Workload

_OF_COMPUTE = "computing", "forward_share"  # what differs between ranks
_OF_COST = "coding", "payload_bytes", "wire_bytes"
_REPEATS = 5
_Measured = TypeVar("_Measured", Profile, Cost)
Progress = Callable[[int, int, str], None]
"""Called before each measurement: its number, how many there are, and what is measured."""


@dataclass(frozen=True)
class Measurements:
    """What is measured, or given, for a recommendation.

    The link and the compute may be given; costs are one for each of ``CANDIDATES``, and of
    ``OUTER_STEPS``.
    """

    compute: Profile
    link: Link
    costs: Sequence[Cost]
    outer_costs: Sequence[Cost]
    stragglers: Stragglers | None = None

    @cached_property
    def predictions(self) -> list[StepTime]:
        """Return the predicted step time of each candidate."""
        return [self._predict(cost, AllReduce()) for cost in self.costs]

    @property
    def algorithms(self) -> tuple[SGP | DiLoCo, ...]:
        """Return what averages weights in place of gradients: gossip of one peer, outer steps."""
        return SGP(overlap=1), *OUTER_STEPS

    @cached_property
    def algorithm_predictions(self) -> list[StepTime]:
        """Return the predicted mean time of a step with each of ``algorithms``."""
        num_bytes = self.costs[0].payload_bytes
        message = Cost("SGP", 0.0, num_bytes, num_bytes if self.link.num_ranks > 1 else 0.0, 1)
        return list(map(self._predict, (message, *self.outer_costs), self.algorithms))

    def _predict(self, cost: Cost, algorithm: Algorithm) -> StepTime:
        return predict(cost, self.compute, self.link, algorithm, self.stragglers)


def benchmark(
    workload: Workload, link: Link, progress: Progress = lambda *_: None,
    compute: Profile | None = None,
) -> Measurements:  # fmt: skip
    """Measure the candidates on this machine, for a given link; the compute unless it is given.

    Coding is measured also for a given compute, with gradients of a step.
    """
    outer = [Candidate(type(each).__name__, each.compressor) for each in OUTER_STEPS]
    total = 1 + len(CANDIDATES) + len(outer)
    progress(1, total, "forward and backward")
    measured = workload.measure(_REPEATS if compute is None else 1)
    buckets, costs = workload.buckets, []
    for step, candidate in enumerate((*CANDIDATES, *outer), start=2):
        progress(step, total, candidate.name)
        costs.append(profile(candidate, buckets, link.num_ranks))
    return Measurements(
        compute or measured, link, costs[: len(CANDIDATES)], costs[len(CANDIDATES) :]
    )


def benchmark_ranks(
    workload: Workload, device: torch.device, progress: Progress = lambda *_: None
) -> Measurements:
    """Measure also the link of the default group; the maximum over ranks, all of which call it."""
    local = benchmark(workload, measure_link(device), progress)
    return replace(
        local,
        compute=_max_over_ranks(local.compute, _OF_COMPUTE, device),
        costs=[_max_over_ranks(cost, _OF_COST, device) for cost in local.costs],
        outer_costs=[_max_over_ranks(each, _OF_COST, device) for each in local.outer_costs],
    )


def _max_over_ranks(local: _Measured, names: Sequence[str], device: torch.device) -> _Measured:
    maxima = max_over_ranks([getattr(local, name) for name in names], device)
    changes: dict[str, Any] = dict(zip(names, maxima, strict=True))
    return replace(local, **changes)
