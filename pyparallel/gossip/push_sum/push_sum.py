"""PushSum over all flat buffers of a model, in the same rounds."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from ...comm import NeighborExchange, PeerError
from ...compression import CorruptMessageError
from ..topology import Neighbors, Topology
from .dense_buffer import DenseBuffer


class Average(Protocol):
    """A flat buffer that takes part in PushSum rounds; `RoundBuffer` documents the methods."""

    values: Tensor
    weight: Tensor
    in_flight: bool

    def send(self, neighbors: Neighbors, step: int) -> None:
        """Start a round."""

    def wait(self) -> None:
        """Wait for the messages of the round in flight."""

    def merge(self) -> None:
        """Wait for the messages of the round in flight and average with them."""

    def as_merged(self) -> tuple[Tensor, Tensor]:
        """Return z and w with the round in flight merged."""

    def to_numerator(self) -> None:
        """Turn z into x = w * z."""

    def to_debiased(self) -> None:
        """Turn x back into z = x / w."""

    def reset_weight(self) -> None:
        """Set w to 1."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state except z."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""


class PushSum:
    """Rounds of averaging with neighbors, one exchange for each buffer.

    A round is ``send``, then ``merge`` at any later time; ``mix`` does both. Each buffer is merged
    once its own messages have been received, while those of the next buffers are in flight, and
    has its own push-sum weight: if a neighbor fails during a round, every buffer is either averaged
    or unchanged. Without failures all these weights are equal.

    Args:
        buffers: flat buffers that hold z; written in place.
        exchange: sends to and receives from the neighbors.
        topology: gives the neighbors of each round and their shares of the mass.
        snapshot: whether z may change while a round is in flight: then a copy of it is sent.
    """

    def __init__(
        self,
        buffers: Sequence[Tensor],
        exchange: NeighborExchange,
        topology: Topology,
        *,
        snapshot: bool = False,
    ) -> None:
        self.exchange = exchange
        self.topology = topology
        self.round_index = 0
        self._averages: list[Average] = [
            DenseBuffer(each, exchange, snapshot=snapshot) for each in buffers
        ]
        self._failure: PeerError | CorruptMessageError | None = None

    @classmethod
    def of(
        cls, averages: Sequence[Average], exchange: NeighborExchange, topology: Topology
    ) -> "PushSum":
        """Create PushSum over buffers that send themselves, such as `CompressedBuffer`."""
        rounds = cls([], exchange, topology)
        rounds._averages = list(averages)
        return rounds

    @property
    def buffers(self) -> list[Tensor]:
        """Z of each buffer, live."""
        return [each.values for each in self._averages]

    @property
    def weight(self) -> Tensor:
        """Push-sum weight w of the first buffer, 0-d float64."""
        return self._averages[0].weight

    @property
    def in_flight(self) -> bool:
        """Whether a round has been sent and not merged."""
        return any(each.in_flight for each in self._averages)

    def mix(self) -> None:
        """Send to the round's out-neighbors and average with the messages of its in-neighbors.

        Raises:
            PeerError: a neighbor failed. Every later round raises the same error.
            CorruptMessageError: a compressed message is invalid; later rounds likewise.
        """
        self.send()
        self.merge()

    def send(self) -> None:
        """Start a round: send the messages and subtract their mass from the weights.

        Without a snapshot the buffers must not change until ``merge`` has returned.

        Raises:
            PeerError: a neighbor is known to have failed.
        """
        neighbors = self.topology.neighbors(self.exchange.rank, self.round_index)
        self._for_each(lambda average: average.send(neighbors, self.round_index))

    def merge(self) -> None:
        """Wait for the messages of the round in flight, if any, and average with them.

        Raises:
            PeerError, CorruptMessageError: as ``mix``.
        """
        if self.in_flight:
            self._for_each(lambda average: average.merge())
            self.round_index += 1

    def wait(self) -> None:
        """Wait for the messages of the round in flight, if any, without averaging them."""
        self._for_each(lambda average: average.wait())

    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """Return z of each buffer and w with the round in flight merged; change nothing."""
        self.wait()
        merged = [each.as_merged() for each in self._averages]
        return [values for values, _ in merged], merged[0][1]

    def to_numerator(self) -> None:
        """Turn z into x = w * z, in place; do nothing if w is 1 by construction."""
        if self.in_flight or not self.topology.regular:
            for average in self._averages:
                average.to_numerator()

    def to_debiased(self) -> None:
        """Turn x back into z = x / w, in place; do nothing if the buffers hold z."""
        for average in self._averages:
            average.to_debiased()

    def reset_weight(self) -> None:
        """Set every weight to 1; all ranks must call it together, between rounds."""
        for average in self._averages:
            average.reset_weight()

    def state_dict(self) -> dict[str, Any]:
        """Wait for the round in flight; return the round index and the state of each buffer."""
        self.wait()
        return {
            "round": self.round_index,
            "buffers": [average.state_dict() for average in self._averages],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned, except z; discard the round in flight."""
        self.wait()
        self.round_index = state["round"]
        for average, saved in zip(self._averages, state["buffers"], strict=True):
            average.load_state_dict(saved)

    def _for_each(self, act: Callable[[Average], None]) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            for average in self._averages:
                act(average)
        except (PeerError, CorruptMessageError) as error:
            self._failure = error
            raise
