"""What a step would take with each compressor, and which of them is worth it: plain arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass

NOISE = 0.05  # of a step: what measurements of the same thing differ by


@dataclass(frozen=True)
class Link:
    """Between ranks.

    Args:
        bytes_per_second: that a rank sends while it receives as many.
        latency: seconds of a collective, however little it sends.
        num_ranks: that take part.
    """

    bytes_per_second: float
    latency: float
    num_ranks: int

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0:
            raise ValueError(
                f"bytes_per_second must be greater than 0, got {self.bytes_per_second}"
            )
        if not self.latency >= 0:
            raise ValueError(f"latency must not be negative, got {self.latency}")
        if self.num_ranks < 1:
            raise ValueError(f"num_ranks must be a positive integer, got {self.num_ranks}")


@dataclass(frozen=True)
class Compute:
    """A step without communication.

    Args:
        forward: seconds.
        backward: seconds.
        buckets: the share of all gradients that each bucket holds, in the order in which they come.
    """

    forward: float
    backward: float
    buckets: tuple[float, ...]


@dataclass(frozen=True)
class Cost:
    """What one way to average gradients costs a rank in a step.

    Args:
        name: as it stands in tables.
        coding: seconds of encoding and decoding.
        payload_bytes: of the messages that it makes.
        wire_bytes: that it sends.
        collectives: that it takes part in.
    """

    name: str
    coding: float
    payload_bytes: float
    wire_bytes: float
    collectives: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step with a compressor.

    Args:
        cost: of the compressor.
        communication: seconds that the link is busy.
        step: forward, backward, coding and communication, as far as these do not overlap.
    """

    cost: Cost
    communication: float
    step: float

    @property
    def name(self) -> str:
        """Of the compressor."""
        return self.cost.name


def predict(cost: Cost, compute: Compute, link: Link) -> StepTime:
    """Two machines in a row: the processor makes buckets, the link carries them.

    The processor's work is the backward and the coding. It works on a bucket while the link carries
    the one before, and each takes of both times what its share of the bytes is. So with B equal
    buckets a step takes ``forward + max(work, communication) + min(work, communication) / B``. The
    optimizer's update is left out.
    """
    communication = cost.wire_bytes / link.bytes_per_second + cost.collectives * link.latency
    if link.num_ranks == 1:
        communication = 0.0
    worked = carried = 0.0
    for share in compute.buckets:
        worked += share * (compute.backward + cost.coding)
        carried = max(carried, worked) + share * communication
    return StepTime(cost, communication, compute.forward + carried)


def choose(predictions: Sequence[StepTime]) -> StepTime:
    """The fastest of those that beat everything simpler by more than the noise.

    Args:
        predictions: simpler ones first; of the first nothing is asked.
    """
    worthy = [
        each
        for place, each in enumerate(predictions)
        if all(each.step < (1 - NOISE) * simpler.step for simpler in predictions[:place])
    ]
    return min(worthy, key=lambda each: each.step)
