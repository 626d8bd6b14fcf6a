"""The predicted step time with a compressor or an algorithm, and the choice among them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...training import Algorithm
from ...training.arguments import check_integer, require
from ..simulate import Cost, Links, Profile, Stragglers, simulate_run

NOISE = 0.05  # relative difference of repeated measurements of a step
_STEPS = 200  # whose mean is predicted, at least; as many come before


@dataclass(frozen=True)
class Link:
    """The link between ranks."""

    bytes_per_second: float  # of a rank in each direction, in full duplex
    latency: float  # seconds of a collective without data
    num_ranks: int

    def __post_init__(self) -> None:
        rule = "bytes_per_second must be greater than 0 and finite"
        require(0 < self.bytes_per_second < math.inf, rule, self.bytes_per_second)
        rule = "latency must be finite and not negative"
        require(0 <= self.latency < math.inf, rule, self.latency)
        check_integer("num_ranks", self.num_ranks)

    @property
    def links(self) -> Links:
        """Return it as links of a simulation, on which as many messages have its latency."""
        messages = Links.uniform(1.0, 1.0).all_reduce_seconds(0.0, self.num_ranks, self.num_ranks)
        return Links.uniform(self.bytes_per_second, self.latency / max(1.0, messages))

    def seconds(self, cost: Cost) -> float:
        """Return the seconds for which an average keeps it busy."""
        if self.num_ranks == 1:
            return 0.0
        return cost.wire_bytes / self.bytes_per_second + cost.collectives * self.latency


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step with a compressor or an algorithm."""

    cost: Cost
    communication: float  # seconds that the link is busy
    step: float  # seconds of all, with their overlap
    waiting: float = 0.0  # share of the step

    @property
    def name(self) -> str:
        """Return the name of the compressor or the algorithm."""
        return self.cost.name


def predict(
    cost: Cost, profile: Profile, link: Link, algorithm: Algorithm,
    stragglers: Stragglers | None = None,
) -> StepTime:  # fmt: skip
    """Predict the mean step of an algorithm by a simulated run, but for its start and end.

    ``cost`` is of averages over all ranks, or of gossip, whose message has its ``payload_bytes``.
    """
    of_all = cost if algorithm.averages_over_all else None
    interval = getattr(algorithm, "interval", 1)
    span = interval * -(-_STEPS // interval)
    run = simulate_run(
        algorithm, link.num_ranks, link.links, profile, cost.payload_bytes,
        num_steps=2 * span + 1, stragglers=stragglers, cost=of_all,
    )  # fmt: skip
    ends = run.times.mean(1)
    step = float(ends[-2] - ends[-2 - span]) / span
    return StepTime(cost, link.seconds(cost) / interval, step, run.waiting / run.seconds)


def choose(predictions: Sequence[StepTime]) -> StepTime:
    """Return the fastest of those faster by more than the noise than all that stand before them."""
    eligible = [
        each
        for place, each in enumerate(predictions)
        if all(each.step < (1 - NOISE) * simpler.step for simpler in predictions[:place])
    ]
    return min(eligible, key=lambda each: each.step)
