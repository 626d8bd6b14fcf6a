"""All figures that a recommendation rests on: of the compute, of the link, of every candidate."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from .candidates import CANDIDATES
from .link import max_over_ranks, measure_link
from .model import Compute, Cost, Link, StepTime, predict
from .profile import profile
from .workload import Workload

_OF_COSTS = ("coding", "payload_bytes", "wire_bytes")  # they may depend on a rank's gradients
_Figures = TypeVar("_Figures", Compute, Cost)


@dataclass(frozen=True)
class Measurements:
    """What has been measured or assumed.

    Args:
        compute: of a step.
        link: between ranks.
        costs: of the candidates, in their order.
    """

    compute: Compute
    link: Link
    costs: Sequence[Cost]

    @property
    def predictions(self) -> list[StepTime]:
        """Of the candidates, in their order."""
        return [predict(cost, self.compute, self.link) for cost in self.costs]


def benchmark(workload: Workload, link: Link) -> Measurements:
    """Measure the compute and the candidates here, for a link that is said to be there."""
    compute = workload.measure()
    buckets = workload.buckets
    costs = [profile(candidate, buckets, link.num_ranks) for candidate in CANDIDATES]
    return Measurements(compute, link, costs)


def benchmark_ranks(workload: Workload, device: torch.device) -> Measurements:
    """Measure the link, too, which is that of the default process group; the slowest rank counts.

    All ranks call it together, and get the same.

    Args:
        workload: of this rank.
        device: that the process group's backend serves.
    """
    mine = benchmark(workload, measure_link(device))
    return replace(
        mine,
        compute=_max_over_ranks(mine.compute, ("forward", "backward"), device),
        costs=[_max_over_ranks(cost, _OF_COSTS, device) for cost in mine.costs],
    )


def _max_over_ranks(mine: _Figures, names: Sequence[str], device: torch.device) -> _Figures:
    """With the largest of all ranks for each of these."""
    found = max_over_ranks([getattr(mine, name) for name in names], device)
    changes: dict[str, Any] = dict(zip(names, found, strict=True))
    return replace(mine, **changes)
