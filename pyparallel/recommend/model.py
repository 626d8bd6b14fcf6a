"""The model of the step time with a compressor, and the choice among compressors."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..training.arguments import check_integer, require

NOISE = 0.05  # relative difference of repeated measurements of a step


@dataclass(frozen=True)
class Link:
    """The link between ranks."""

    bytes_per_second: float  # of a rank in each direction, in full duplex
    latency: float  # seconds of a collective without data
    num_ranks: int

    def __post_init__(self) -> None:
        rule = "bytes_per_second must be greater than 0"
        require(self.bytes_per_second > 0, rule, self.bytes_per_second)
        require(self.latency >= 0, "latency must not be negative", self.latency)
        check_integer("num_ranks", self.num_ranks)


@dataclass(frozen=True)
class Compute:
    """The compute time of a step, without communication, in seconds."""

    forward: float
    backward: float
    buckets: tuple[float, ...]  # each one's share of all gradient bytes, in their order


@dataclass(frozen=True)
class Cost:
    """The cost of averaging gradients with one compressor, per rank and step."""

    name: str  # of the compressor in tables
    coding: float  # seconds of encoding and decoding
    payload_bytes: float  # of the encoded messages
    wire_bytes: float  # sent
    collectives: int  # how many


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step with a compressor."""

    cost: Cost
    communication: float  # seconds that the link is busy
    step: float  # seconds of all, with their overlap

    @property
    def name(self) -> str:
        """Return the name of the compressor."""
        return self.cost.name


def predict(cost: Cost, compute: Compute, link: Link) -> StepTime:
    """Predict the time of a step in which communication overlaps backward and coding.

    The link sends a bucket while the processor computes the next one. So with B equal buckets a
    step takes ``forward + max(work, communication) + min(work, communication) / B``, without the
    optimizer's update; ``work`` is backward and coding.
    """
    communication = _communication(cost, link)
    computed = sent = 0.0  # seconds from the start of the backward
    for share in compute.buckets:
        computed += share * (compute.backward + cost.coding)
        sent = max(sent, computed) + share * communication
    return StepTime(cost, communication, compute.forward + sent)


def predict_outer(
    cost: Cost, compute: Compute, link: Link, *, interval: int, fragments: int, delay: int
) -> StepTime:
    """Predict the mean time of a local step with outer steps of this cost at an interval.

    What a fragment sends travels beside ``delay`` local steps; the ranks wait for the rest.
    """
    communication, local = _communication(cost, link), compute.forward + compute.backward
    exposed = fragments * max(0.0, communication / fragments - delay * local)
    return StepTime(cost, communication / interval, local + (cost.coding + exposed) / interval)


def _communication(cost: Cost, link: Link) -> float:
    if link.num_ranks == 1:
        return 0.0
    return cost.wire_bytes / link.bytes_per_second + cost.collectives * link.latency


def choose(predictions: Sequence[StepTime]) -> StepTime:
    """Return the fastest of those faster by more than the noise than all that stand before them."""
    eligible = [
        each
        for place, each in enumerate(predictions)
        if all(each.step < (1 - NOISE) * simpler.step for simpler in predictions[:place])
    ]
    return min(eligible, key=lambda each: each.step)
