"""PushSum of one flat buffer with dense messages."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ...comm import (
    NeighborExchange,
    PeerError,
    PendingExchange,
    RoundHeaders,
    Transfer,
    check_like,
)
from ..topology import Neighbors
from .buffer import RoundBuffer, receive, total_mass


class DenseBuffer(RoundBuffer):
    """De-biased values z, push-sum weight w, and one round at a time with neighbors.

    Only z and w are stored. A message is z with the mass that is sent along; the numerator
    x = w * z of the paper exists only while an optimizer steps on it.

    A round is ``send``, then ``merge`` at any later time. In between its messages are in flight,
    and their mass is missing from w.

    Args:
        values: z: flat, float32, bfloat16 or float16; written in place.
        exchange: sends to and receives from the neighbors.
        snapshot: whether z may change while a round is in flight: then a copy of it is sent.
    """

    def __init__(
        self, values: Tensor, exchange: NeighborExchange, *, snapshot: bool = False
    ) -> None:
        super().__init__(values)
        self._exchange = exchange
        self._pending: PendingExchange | None = None
        self._headers: RoundHeaders | None = None
        self._outgoing = torch.empty_like(values) if snapshot else None
        self._has_snapshot = False  # of z as it is now
        self._sent_masses = self.weight.new_zeros(0)
        self._receive_buffers: list[Tensor] = []

    @override
    @torch.no_grad()
    def send(self, neighbors: Neighbors, step: int) -> None:
        """Start a round; without a snapshot z must not change until ``merge`` has returned."""
        self._allocate(len(neighbors.in_peers))
        masses = self._sent_masses = self.outgoing_mass(neighbors.shares)
        message = self._message_to_send()
        num_bytes = message.numel() * message.element_size()
        headers = self._exchange.headers.of_round(
            step, masses, num_bytes, neighbors.in_peers, masses_in=neighbors.in_masses
        )
        sends, receives = [], []
        for peer, row in zip(neighbors.out_peers, headers.sent, strict=True):
            sends += [Transfer(peer, row, is_header=True), Transfer(peer, message)]
        for peer, row, buffer in zip(
            neighbors.in_peers, headers.received, self._receive_buffers, strict=False
        ):
            receives += [Transfer(peer, row, is_header=True), Transfer(peer, buffer)]
        with torch.profiler.record_function("pyparallel::gossip_send"):
            self._pending = self._exchange.start(sends, receives, step)
        self._headers = headers
        self.weight -= total_mass(masses)
        self.in_flight = True

    @override
    @torch.no_grad()
    def wait(self) -> None:
        if self._pending is None:
            return
        with torch.profiler.record_function("pyparallel::gossip_wait"):
            try:
                self._received_masses = receive(self._pending, self._headers)
            except PeerError:
                self._pending, self.in_flight = None, False
                self.weight += total_mass(self._sent_masses)
                raise
        self._pending = None  # kept if the wait was interrupted, so that it can be repeated

    @override
    def step(self, step: Callable[..., None], *, merges: bool, sends: bool) -> None:
        """Step, average with the round in flight, and copy z to be sent, all in one pass."""
        if merges:
            self.wait()
        mixes = merges and self.in_flight
        step(
            mass=self.weight,
            messages=self._messages if mixes else (),
            masses=self._received_masses if mixes else None,
            message=self._outgoing if sends else None,
        )
        self._has_snapshot = sends
        if mixes:
            self.in_flight = False

    @override
    def state_dict(self) -> dict[str, Any]:
        """Wait for the round in flight; return w and the messages that are not merged yet."""
        self.wait()
        in_flight = {"messages": self._messages, "masses": self._received_masses}
        return {"weight": self.weight, "in_flight": in_flight if self.in_flight else None}

    @override
    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait()
        self.weight.copy_(state["weight"])
        self.in_flight = state["in_flight"] is not None
        if self.in_flight:
            self._received_masses = state["in_flight"]["masses"].to(self.weight)
            messages = state["in_flight"]["messages"]
            self._allocate(len(messages))
            for buffer, message in zip(self._receive_buffers, messages, strict=False):
                buffer.copy_(message)

    @override
    def check_state(self, state: dict[str, Any], num_ranks: int, path: str) -> None:
        super().check_state(state, num_ranks, path)
        if (in_flight := state["in_flight"]) is not None:
            own = [self.values] * len(in_flight["masses"])
            check_like(in_flight["messages"], own, f"{path}.in_flight.messages")

    @property
    @override
    def _messages(self) -> list[Tensor]:
        return self._receive_buffers[: len(self._received_masses)]

    def _message_to_send(self) -> Tensor:
        """Return z, or a copy of it that may stay in flight while z changes."""
        if self._outgoing is None:
            return self.values
        if not self._has_snapshot:
            self._outgoing.copy_(self.values)
        self._has_snapshot = False
        return self._outgoing

    def _allocate(self, num_messages: int) -> None:
        missing = num_messages - len(self._receive_buffers)
        self._receive_buffers += [torch.empty_like(self.values) for _ in range(missing)]
