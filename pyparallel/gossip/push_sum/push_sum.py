"""PushSum over the flat buffers of a model: they take their rounds in lockstep."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from ...comm import NeighborExchange, PeerError
from ...compression import CorruptMessageError
from ..topology import Neighbors, Topology
from .dense_buffer import DenseBuffer


class Average(Protocol):
    """A flat buffer in rounds of PushSum: see `DenseBuffer` for what the methods owe."""

    values: Tensor
    weight: Tensor
    in_flight: bool

    def send(self, neighbors: Neighbors, step: int) -> None:
        """Let a round begin."""

    def arrive(self) -> None:
        """Wait for its messages."""

    def merge(self) -> None:
        """Average with them."""

    def as_merged(self) -> tuple[Tensor, Tensor]:
        """What z and w would be after that."""

    def to_numerator(self) -> None:
        """Turn z into x = w * z."""

    def to_debiased(self) -> None:
        """And back."""

    def reset_weight(self) -> None:
        """Make the weight 1."""

    def state_dict(self) -> dict[str, Any]:
        """All but z."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there."""


class PushSum:
    """Rounds of averaging with neighbors, one exchange for each buffer.

    A round is ``send``, whenever the caller likes something else, ``merge``; ``mix`` is both at
    once. Each buffer is merged as soon as its own messages are there, while the next ones still
    travel, and has a mass of its own: a neighbor that dies half-way through a round leaves every
    buffer either averaged or as it was. As long as nobody dies these masses are one number.

    Args:
        buffers: flat buffers that hold z; written in place.
        exchange: the way to the neighbors.
        topology: who they are at each round, and which share of the mass they get.
        snapshot: whether z may change while a round is under way: then a copy of it is sent.
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
        """Of buffers that have a way of their own to send themselves."""
        rounds = cls([], exchange, topology)
        rounds._averages = list(averages)
        return rounds

    @property
    def buffers(self) -> list[Tensor]:
        """z, the live ones."""
        return [each.values for each in self._averages]

    @property
    def weight(self) -> Tensor:
        """w: 0-d float64."""
        return self._averages[0].weight

    @property
    def in_flight(self) -> bool:
        """Whether a round has been sent and not merged."""
        return any(each.in_flight for each in self._averages)

    def mix(self) -> None:
        """Send to this round's out-neighbors and average with what its in-neighbors sent.

        Raises:
            PeerError: a neighbor is gone. Every later round raises the same.
            CorruptMessageError: of compressed ones; likewise.
        """
        self.send()
        self.merge()

    def send(self) -> None:
        """Let a round begin: the messages leave, and their mass with them.

        Without a snapshot the buffers must not change until ``merge`` has returned.

        Raises:
            PeerError: a neighbor is known to be gone.
        """
        neighbors = self.topology.neighbors(self.exchange.rank, self.round_index)
        self._each(lambda average: average.send(neighbors, self.round_index))

    def merge(self) -> None:
        """Wait for the messages of the round under way, if there is one, and average with them.

        Raises:
            PeerError: a neighbor is gone, as ``mix`` says.
        """
        if self.in_flight:
            self._each(lambda average: average.merge())
            self.round_index += 1

    def arrive(self) -> None:
        """Wait for the messages of the round under way, if there is one, and leave them be."""
        self._each(lambda average: average.arrive())

    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """What z and w would be if the round under way were merged now; nothing changes."""
        self.arrive()
        merged = [each.as_merged() for each in self._averages]
        return [values for values, _ in merged], merged[0][1]

    def to_numerator(self) -> None:
        """Turn z into x = w * z, in place; nothing to do where w is 1 by construction."""
        if self.in_flight or not self.topology.regular:
            for average in self._averages:
                average.to_numerator()

    def to_debiased(self) -> None:
        """Turn x back into z = x / w, in place; nothing to do where the buffers hold z."""
        for average in self._averages:
            average.to_debiased()

    def reset_weight(self) -> None:
        """Make every weight 1, between rounds, by all ranks together: the mass stays what it is."""
        for average in self._averages:
            average.reset_weight()

    def state_dict(self) -> dict[str, Any]:
        """The round, masses, and messages not merged yet; waits for those, changes nothing."""
        self.arrive()
        return {
            "round": self.round_index,
            "buffers": [average.state_dict() for average in self._averages],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, z itself apart; what travels now is dropped."""
        self.arrive()
        self.round_index = state["round"]
        for average, saved in zip(self._averages, state["buffers"], strict=True):
            average.load_state_dict(saved)

    def _each(self, act: Callable[[Average], None]) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            for average in self._averages:
                act(average)
        except (PeerError, CorruptMessageError) as error:
            self._failure = error
            raise
