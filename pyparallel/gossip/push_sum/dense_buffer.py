"""PushSum of one flat buffer with dense messages."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ...comm import PeerError
from ...ops.mix import mix_reference, mix_unchecked
from ...training import check_like
from ..messages import NeighborExchange
from ..topology import Neighbors
from .buffer import RoundBuffer, total_mass


class DenseBuffer(RoundBuffer):
    """De-biased values z, push-sum weight w, and one round at a time with neighbors.

    Only z and w are stored. A message is z with the mass that is sent along. In a complete round of
    float32 values the numerators are added by an all-reduce, which sends 2 (n - 1) / n copies from
    each of n ranks instead of n - 1; what is merged is the sum of the others.

    With ``snapshot`` z may change while a round is in flight: a copy of it is sent. So it is if the
    exchange has memory for messages.
    """

    def __init__(
        self,
        values: Tensor,
        exchange: NeighborExchange,
        *,
        snapshot: bool = False,
        takes_back: bool = True,
    ) -> None:
        super().__init__(values, takes_back=takes_back)
        self._exchange = exchange
        memory = exchange.reserve([[values.nbytes]], values.device)
        self._outgoing = torch.empty_like(values) if snapshot else None
        if memory is not None:
            self._outgoing = memory[: values.nbytes].view(values.dtype)
        self._has_snapshot = False  # of z as it is now
        self._sent_masses = self.weight.new_zeros(0)
        self._receive_buffers: list[Tensor] = []

    @override
    @torch.no_grad()
    def send(self, neighbors: Neighbors, step: int) -> None:
        """Start a round; without a snapshot z must not change until ``merge`` has returned."""
        masses = self.outgoing_mass(neighbors.shares)
        self._start(self._message_to_send(), masses, neighbors, step)
        self._give(masses)

    @torch.no_grad()
    def send_and_merge(self, neighbors: Neighbors, step: int) -> None:
        """Send z and w as they are, then average with the round that was in flight before.

        That round is waited for first, so that one copy of z is enough. Arguments and errors are
        those of ``send`` and ``merge``.
        """
        self.wait()
        message, masses = self._message_to_send(), self.outgoing_mass(neighbors.shares)
        self._give(masses)
        self.merge()
        try:
            self._start(message, masses, neighbors, step)
        except PeerError:
            self._take_back(masses)
            raise

    @override
    def take_snapshot(self) -> None:
        self._message_to_send()
        self._has_snapshot = True

    @property
    @override
    def snapshot(self) -> Tensor:
        assert self._outgoing is not None
        return self._outgoing

    @override
    @torch.no_grad()
    def wait(self) -> None:
        try:
            self._receive()
        except PeerError:
            self._round, self.in_flight = None, False
            if self._takes_back:
                self._take_back(self._sent_masses)
            raise

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
            self._receive_buffers = [torch.empty_like(self.values).copy_(m) for m in messages]

    @override
    def check_state(self, state: dict[str, Any], num_ranks: int, path: str) -> None:
        super().check_state(state, num_ranks, path)
        if (in_flight := state["in_flight"]) is not None:
            own = [self.values] * len(in_flight["masses"])
            check_like(in_flight["messages"], own, f"{path}.in_flight.messages")

    @property
    def _messages(self) -> list[Tensor]:
        """The received messages, one for each of the received masses."""
        return self._receive_buffers[: len(self._received_masses)]

    @override
    def _average(self, values: Tensor, weight: Tensor) -> None:
        mix = mix_reference if values.dtype == torch.float64 else mix_unchecked
        mix(values, weight, self._messages, self._received_masses)

    def _start(self, message: Tensor, masses: Tensor, neighbors: Neighbors, step: int) -> None:
        by_all_reduce = neighbors.is_complete and message.dtype == torch.float32
        num_messages = 1 if by_all_reduce else len(neighbors.in_peers)
        while len(self._receive_buffers) < num_messages:
            self._receive_buffers.append(torch.zeros_like(self.values))
        self._round = self._exchange.swap(
            [message],
            neighbors.out_peers,
            neighbors.in_peers,
            into=[[buffer] for buffer in self._receive_buffers[:num_messages]],
            round_index=step,
            masses=masses,
            masses_in=neighbors.in_masses,
            by_all_reduce=by_all_reduce,
        )
        self._sent_masses = masses
        self.in_flight = True

    def _give(self, masses: Tensor) -> None:
        self.weight -= total_mass(masses)

    def _take_back(self, masses: Tensor) -> None:
        """Take back masses (k,) whose messages were not delivered."""
        self.weight += total_mass(masses)

    def _message_to_send(self) -> Tensor:
        """Return z, or a copy of it that may stay in flight while z changes."""
        if self._outgoing is None:
            return self.values
        if not self._has_snapshot:
            self._outgoing.copy_(self.values)
        self._has_snapshot = False
        return self._outgoing


class BiasedBuffer(DenseBuffer):
    """A dense buffer without push-sum weight: its values are x, float32, and w is 1.

    The ablation of Assran et al.: a round multiplies x by the share that the rank keeps and adds
    the shares received, so that x is biased unless all messages are merged and rows of the mixing
    matrix sum to 1.
    """

    def __init__(self, values: Tensor, exchange: NeighborExchange) -> None:
        super().__init__(values, exchange, snapshot=True)

    @override
    def to_numerator(self, *, keeps_values: bool) -> None:
        """Do nothing: the values are the numerator."""

    @override
    def _give(self, masses: Tensor) -> None:
        self.values.mul_(1 - total_mass(masses))

    @override
    def _take_back(self, masses: Tensor) -> None:
        assert self._outgoing is not None
        self.values.add_(self._outgoing * total_mass(masses))

    @override
    def _average(self, values: Tensor, weight: Tensor) -> None:
        for message, mass in zip(self._messages, self._received_masses, strict=True):
            values.add_(message * mass)
