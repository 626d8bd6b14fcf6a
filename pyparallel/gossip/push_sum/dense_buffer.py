"""PushSum of one flat buffer: its mass, and its messages under way."""

from typing import Any

import torch
from torch import Tensor

from ...comm import NeighborExchange, PeerError, PendingExchange, Transfer
from ..topology import Neighbors
from .buffer import RoundBuffer


class DenseBuffer(RoundBuffer):
    """The de-biased values z of a buffer, their mass w, and one round with neighbors at a time.

    Only z and w are kept. The message is z itself, with the mass that goes along beside it; the
    numerator x = w * z of the paper exists only while an optimizer steps on it.

    A round is ``send``, whenever the caller likes something else, ``merge``. In between its
    messages travel, and their mass is missing from w.

    Args:
        values: z: flat, float32, bfloat16 or float16; written in place.
        exchange: the way to the neighbors.
        snapshot: whether z may change while a round is under way: then a copy of it is sent.
    """

    def __init__(
        self, values: Tensor, exchange: NeighborExchange, *, snapshot: bool = False
    ) -> None:
        super().__init__(values)
        self._exchange = exchange
        self._round: PendingExchange | None = None
        self._outgoing = torch.empty_like(values) if snapshot else None
        self._sent_masses = self.weight.new_zeros(0)
        self._inboxes: list[Tensor] = []

    @torch.no_grad()
    def send(self, neighbors: Neighbors, step: int) -> None:
        """Let a round begin: the messages leave, and their mass with them.

        Without a snapshot the values must not change until ``merge`` has returned.

        Args:
            neighbors: who sends to whom, and which share of the mass.
            step: the number that an error message names.

        Raises:
            PeerError: a neighbor is known to be gone; the mass has not left.
        """
        self._received_masses = self.weight.new_empty(len(neighbors.in_peers))
        self._make_room(len(neighbors.in_peers))
        masses = self._sent_masses = self.outgoing_mass(neighbors.shares)
        message = self._take()
        sends = [
            Transfer(peer, tensor)
            for slot, peer in enumerate(neighbors.out_peers)
            for tensor in (masses[slot : slot + 1], message)
        ]
        receives = [
            Transfer(peer, tensor)
            for slot, peer in enumerate(neighbors.in_peers)
            for tensor in (self._received_masses[slot : slot + 1], self._inboxes[slot])
        ]
        with torch.profiler.record_function("pyparallel::gossip_send"):
            self._round = self._exchange.start(sends, receives, step)
        self.weight -= masses.sum()
        self.in_flight = True

    @torch.no_grad()
    def arrive(self) -> None:
        """Wait for the messages of the round under way, if there is one, and leave them be.

        Raises:
            PeerError: a neighbor is gone. z and w are then as before the round, but other
                neighbors may have merged what this rank sent.
        """
        if self._round is None:
            return
        with torch.profiler.record_function("pyparallel::gossip_wait"):
            try:
                self._round.wait()
            except PeerError:
                self._round, self.in_flight = None, False
                self.weight += self._sent_masses.sum()
                raise
        self._round = None  # not where a wait was interrupted: it can be repeated

    def reset_weight(self) -> None:
        """Make the weight 1, between rounds."""
        self.weight.fill_(1)

    def state_dict(self) -> dict[str, Any]:
        """The mass, and the messages that have arrived and are not merged; waits for those."""
        self.arrive()
        in_flight = {"messages": self._messages, "masses": self._received_masses}
        return {"weight": self.weight, "in_flight": in_flight if self.in_flight else None}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, z itself apart; what travels now is dropped."""
        self.arrive()
        self.weight.copy_(state["weight"])
        self.in_flight = state["in_flight"] is not None
        if self.in_flight:
            self._received_masses = state["in_flight"]["masses"].to(self.weight)
            messages = state["in_flight"]["messages"]
            self._make_room(len(messages))
            for inbox, message in zip(self._inboxes, messages, strict=False):
                inbox.copy_(message)

    @property
    def _messages(self) -> list[Tensor]:
        return self._inboxes[: len(self._received_masses)]

    def _take(self) -> Tensor:
        """What is sent: z, or a copy that lasts."""
        return self.values if self._outgoing is None else self._outgoing.copy_(self.values)

    def _make_room(self, num_messages: int) -> None:
        missing = num_messages - len(self._inboxes)
        self._inboxes += [torch.empty_like(self.values) for _ in range(missing)]
