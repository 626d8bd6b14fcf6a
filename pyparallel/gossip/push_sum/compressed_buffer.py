"""PushSum of one flat buffer with compressed messages."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...comm import NeighborExchange, PeerError, PendingExchange, Transfer
from ...compression import BufferLayout, Compressor, CorruptMessageError, Message
from ...ops import mix_
from ..topology import Neighbors, Topology
from .buffer import RoundBuffer
from .replica import Replica
from .replicas import Replicas


@dataclass(frozen=True)
class _PendingMessage:
    """What is to come from a neighbor, and whose mirror it will move."""

    sender: int
    mirror: Replica
    message: Message


class CompressedBuffer(RoundBuffer):
    """The values z of a buffer, their mass w, and a round with neighbors at a time, compressed.

    Messages are differences to a mirror of z that sender and receivers share (`Replica`), as in
    CHOCO-SGD (Koloskova et al., ICML 2019, arXiv 1902.00340), and receivers average with the mirror
    in place of z. So that no mass is lost, with the mass m leaves only m * mirror of the numerator:
    what has not been told stays, ``z += (z - mirror) * m / (w - m)`` and then ``w -= m``. Whatever
    the compressor, the sum of w * z over ranks and messages is what it was, to rounding.

    Args:
        values: z: flat, float32, bfloat16 or float16; written in place.
        exchange: the way to the neighbors.
        topology: says who else listens to those that this rank listens to.
        compressor: of the messages; the same on all ranks, with ``fixed_length``.
        layout: of the values.
    """

    def __init__(
        self,
        values: Tensor,
        exchange: NeighborExchange,
        topology: Topology,
        compressor: Compressor,
        layout: BufferLayout,
    ) -> None:
        super().__init__(values)
        self._exchange = exchange
        self._topology = topology
        self._mirrors = Replicas(values, layout, compressor, exchange.rank)
        self._round: PendingExchange | None = None
        self._step = 0
        self._told: Replica | None = None
        self._sent_mass = torch.zeros_like(self.weight)
        self._letters: list[_PendingMessage] = []
        self._heard: list[Replica] = []

    @torch.no_grad()
    def send(self, neighbors: Neighbors, step: int) -> None:
        """Let a round begin: the messages leave, and their mass with them.

        Args:
            neighbors: who sends to whom, and which share of the mass.
            step: the round of the topology, which an error message names.

        Raises:
            PeerError: a neighbor is known to be gone; the mass has not left. Mirrors are then not
                equal any more: no other round can follow.
        """
        masses = self.outgoing_mass(neighbors.shares)
        sends = self._tell(neighbors.out_peers, masses)
        receives = self._expect(neighbors.in_peers, step)
        with torch.profiler.record_function("pyparallel::gossip_send"):
            self._round = self._exchange.start(sends, receives, step)
        self._step, self._sent_mass = step, masses.sum()
        self._retain_residual()
        self.in_flight = True

    @torch.no_grad()
    def arrive(self) -> None:
        """Wait for the messages of the round under way, if there is one, and let mirrors follow.

        Raises:
            PeerError: a neighbor is gone. z and w are then as before the round, but other
                neighbors may have merged what this rank sent. No other round can follow.
            CorruptMessageError: a neighbor sent what no compressor makes; likewise.
        """
        try:
            if self._round is not None:
                with torch.profiler.record_function("pyparallel::gossip_wait"):
                    self._round.wait()
                self._round = None  # not where a wait was interrupted: it can be repeated
            self._hear()
        except (PeerError, CorruptMessageError):
            self._round, self.in_flight, self._letters = None, False, []
            self._take_back()
            raise

    def reset_weight(self) -> None:
        """Make the weight 1, and let mirrors begin anew: all ranks do so, between rounds."""
        self.weight.fill_(1)
        self._mirrors.forget()

    def state_dict(self) -> dict[str, Any]:
        """The mass, the mirrors, and the round that has arrived and is not merged; waits for it."""
        self.arrive()
        in_flight = {"step": self._step, "masses": self._received_masses}
        return {
            "weight": self.weight,
            "mirrors": self._mirrors.state_dict(),
            "in_flight": in_flight if self.in_flight else None,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, z itself apart; what travels now is dropped."""
        self.arrive()
        self.weight.copy_(state["weight"])
        self._mirrors.load_state_dict(state["mirrors"])
        self.in_flight = state["in_flight"] is not None
        if self.in_flight:
            self._step = state["in_flight"]["step"]
            self._received_masses = state["in_flight"]["masses"].to(self.weight)
            senders = self._topology.in_peers(self._exchange.rank, self._step)
            self._heard = [self._mirror_of(sender, self._step) for sender in senders]

    @property
    def _messages(self) -> list[Tensor]:
        return [mirror.values for mirror in self._heard if mirror.values is not None]

    def _mirror_of(self, sender: int, step: int) -> Replica:
        return self._mirrors.of(sender, self._topology.out_peers(sender, step))

    def _tell(self, out_peers: tuple[int, ...], masses: Tensor) -> list[Transfer]:
        self._told = None
        if not out_peers:
            return []
        self._told = self._mirrors.of(self._exchange.rank, out_peers)
        with torch.profiler.record_function("pyparallel::gossip_encode"):
            message = self._mirrors.tell(out_peers, self.values)
        return [
            Transfer(peer, tensor)
            for slot, peer in enumerate(out_peers)
            for tensor in (masses[slot : slot + 1], *message)
            if tensor.numel()
        ]

    def _expect(self, in_peers: tuple[int, ...], step: int) -> list[Transfer]:
        self._received_masses = self.weight.new_empty(len(in_peers))
        self._heard = [self._mirror_of(peer, step) for peer in in_peers]
        self._letters = [
            _PendingMessage(peer, mirror, tuple(self._mirrors.room_for(mirror)))
            for peer, mirror in zip(in_peers, self._heard, strict=True)
        ]
        return [
            Transfer(letter.sender, tensor)
            for slot, letter in enumerate(self._letters)
            for tensor in (self._received_masses[slot : slot + 1], *letter.message)
            if tensor.numel()
        ]

    def _hear(self) -> None:
        with torch.profiler.record_function("pyparallel::gossip_decode"):
            while self._letters:
                letter = self._letters[0]
                try:
                    letter.mirror.hear(letter.message)
                except CorruptMessageError as error:
                    raise self._corrupt(letter.sender, error) from error
                del self._letters[0]

    def _corrupt(self, sender: int, error: CorruptMessageError) -> CorruptMessageError:
        here, there = (self._exchange.global_rank(r) for r in (self._exchange.rank, sender))
        return CorruptMessageError(
            f"rank {here}, step {self._step}: messages must be what their compressor makes, got a "
            f"corrupt one on edge {there} -> {here} from rank {there} ({error}): this rank and "
            "that one do not know the same of each other any more; end the run and load a "
            "checkpoint"
        )

    def _retain_residual(self) -> None:
        """Make z what is left of the numerator over what is left of the mass."""
        self.weight -= self._sent_mass
        if self._told is not None and self._told.values is not None:
            ratio = (self._sent_mass / self.weight).float()
            own = self.values.float()
            self.values.copy_(own + (own - self._told.values.float()) * ratio)

    def _take_back(self) -> None:
        """Undo `_retain_residual`, whatever an optimizer has done to z since."""
        if self._told is not None and self._told.values is not None:
            mix_(self.values, self.weight, [self._told.values], self._sent_mass.view(1))
            self._told = None
