"""The measurements behind a recommendation: compute, link and compressors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..gossip import SGP, AllReduce, DiLoCo
from ..gossip.algorithms.base import Algorithm
from ..gossip.topology import OnePeerExponential
from ..simulate import Cost, Profile, Stragglers
from .candidates import CANDIDATES, OUTER_STEPS, Candidate
from .link import max_over_ranks, measure_link
from .model import Link, StepTime, predict
from .profile import profile
from .workload import Workload

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
        return SGP(OnePeerExponential(self.link.num_ranks), overlap=1), *OUTER_STEPS

    @cached_property
    def algorithm_predictions(self) -> list[StepTime]:
        """Return the predicted mean time of a step with each of ``algorithms``."""
        dense = self.costs[0]
        message = replace(dense, name="SGP", wire_bytes=dense.payload_bytes, collectives=1)
        costs = message, *self.outer_costs
        return list(map(self._predict, costs, self.algorithms))

    def _predict(self, cost: Cost, algorithm: Algorithm) -> StepTime:
        return predict(cost, self.compute, self.link, algorithm, self.stragglers)


def benchmark(
    workload: Workload,
    link: Link,
    progress: Progress = lambda *_: None,
    compute: Profile | None = None,
    stragglers: Stragglers | None = None,
) -> Measurements:
    """Measure the candidates on this machine, for a given link; the compute too if none is given.

    Coding is measured here also for a given compute, with the gradients of one step.
    """
    outer = [Candidate(type(each).__name__, each.compressor) for each in OUTER_STEPS]
    total = 1 + len(CANDIDATES) + len(outer)
    progress(1, total, "forward and backward")
    if compute is None:
        compute = workload.measure()
    else:
        workload.step()
    buckets, costs = workload.buckets, []
    for step, candidate in enumerate((*CANDIDATES, *outer), start=2):
        progress(step, total, candidate.name)
        costs.append(profile(candidate, buckets, link.num_ranks))
    of_gradients, of_weights = costs[: len(CANDIDATES)], costs[len(CANDIDATES) :]
    return Measurements(compute, link, of_gradients, of_weights, stragglers)


def benchmark_ranks(
    workload: Workload,
    device: torch.device,
    progress: Progress = lambda *_: None,
    stragglers: Stragglers | None = None,
) -> Measurements:
    """Measure also the link of the default group; the maximum over ranks, all of which call it."""
    local = benchmark(workload, measure_link(device), progress, stragglers=stragglers)
    share = local.compute.forward_share
    shares = share, 1 - share
    forward, backward = max_over_ranks([each * local.compute.computing for each in shares], device)
    return replace(
        local,
        compute=Profile(forward + backward, forward / (forward + backward)),
        costs=[_max_over_ranks(cost, device) for cost in local.costs],
        outer_costs=[_max_over_ranks(cost, device) for cost in local.outer_costs],
    )


def _max_over_ranks(local: Cost, device: torch.device) -> Cost:
    coding, payload_bytes, wire_bytes = max_over_ranks(
        [local.coding, local.payload_bytes, local.wire_bytes], device
    )
    return replace(local, coding=coding, payload_bytes=payload_bytes, wire_bytes=wire_bytes)
