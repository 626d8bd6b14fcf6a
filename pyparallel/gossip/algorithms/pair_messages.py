"""The request of an active rank and the replies of a passive one, as in AD-PSGD."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ...comm.profiling import profiled
from ..messages import NeighborExchange, Round

NUM_RECEIVE_BUFFERS = 2


class _Request:
    """The own request: sends z, then receives the difference d as the reply.

    Both use one copy of z: the reply begins to arrive only when the whole request has been sent.
    """

    def __init__(self, buffers: Sequence[Tensor], exchange: NeighborExchange) -> None:
        self.index = 0
        self.is_replied = False
        self._buffers = buffers
        self._exchange = exchange
        self._messages: list[Tensor] = []
        self._round: Round | None = None
        self._sent_at = 0.0

    @property
    def in_flight(self) -> bool:
        return self._round is not None or self.is_replied

    def send(self, peer: int) -> None:
        self._allocate()
        for message, buffer in zip(self._messages, self._buffers, strict=True):
            message.copy_(buffer)
        # The receive is posted before the passive rank sees the request: replies never block.
        self._round = self._exchange.swap(
            self._messages, [peer], [peer], into=[self._messages], round_index=self.index
        )
        self._sent_at = time.monotonic()
        self.index += 1

    def check(self, timeout: float) -> None:
        if not self.is_replied and time.monotonic() - self._sent_at > timeout:
            self._wait()  # raises for a dead peer now, for a silent one after the group's timeout

    def apply_reply(self) -> None:
        self._wait()
        with profiled("pyparallel::gossip_merge"):
            self.subtract_from(self._buffers)
        self._round, self.is_replied = None, False

    def wait_if_replied(self) -> None:
        if self.is_replied:
            self._wait()

    def subtract_from(self, buffers: Sequence[Tensor]) -> None:
        for buffer, difference in zip(buffers, self._messages, strict=True):
            buffer.add_(difference, alpha=-0.5)

    def received(self) -> list[Tensor]:
        return self._messages if self.is_replied else []

    def restore(self, index: int, received: Sequence[Tensor]) -> None:
        self.index, self._round, self.is_replied = index, None, bool(received)
        if received:
            self._allocate()
            for message, difference in zip(self._messages, received, strict=True):
                message.copy_(difference)

    def abandon(self) -> None:
        self._round = None

    def _allocate(self) -> None:
        if not self._messages:
            self._messages = [torch.empty_like(buffer) for buffer in self._buffers]

    def _wait(self) -> None:
        if self._round is not None:
            self._round.wait()


class _Replies:
    """The requests that this rank accepts as the passive one, and its replies, one at a time."""

    def __init__(self, buffers: Sequence[Tensor], exchange: NeighborExchange) -> None:
        self.active_rank: int | None = None
        self._buffers = buffers
        self._exchange = exchange
        self._num_replies = 0
        self._receive_buffers: list[list[Tensor]] = []
        self._rounds: list[Round | None] = [None] * NUM_RECEIVE_BUFFERS

    @property
    def _slot(self) -> int:
        return self._num_replies % NUM_RECEIVE_BUFFERS

    def accept(self, active_rank: int) -> None:
        """Start to receive the request of ``active_rank``."""
        if len(self._receive_buffers) < NUM_RECEIVE_BUFFERS:
            self._receive_buffers.append([torch.empty_like(buffer) for buffer in self._buffers])
        self._wait_for(self._slot)  # the reply before the last may still be in flight from there
        messages = self._receive_buffers[self._slot]
        self._rounds[self._slot] = self._exchange.swap([], [], [active_rank], into=[messages])
        self.active_rank = active_rank

    def reply(self) -> int:
        """Average with the received request, send d as the reply, and return the active rank."""
        assert self.active_rank is not None
        active_rank, self.active_rank = self.active_rank, None
        request = self._rounds[self._slot]
        assert request is not None
        request.wait()
        messages = self._receive_buffers[self._slot]
        with profiled("pyparallel::gossip_merge"):
            for buffer, message in zip(self._buffers, messages, strict=True):
                message.sub_(buffer)
                buffer.add_(message, alpha=0.5)
        self._rounds[self._slot] = self._exchange.swap(
            messages, [active_rank], [], round_index=request.round_index
        )
        self._num_replies += 1
        return active_rank

    def wait(self) -> None:
        """Wait until all replies have been sent."""
        for slot in range(NUM_RECEIVE_BUFFERS):
            self._wait_for(slot)

    def abandon(self) -> None:
        self._rounds = [None] * NUM_RECEIVE_BUFFERS

    def _wait_for(self, slot: int) -> None:
        if (sent := self._rounds[slot]) is not None:
            sent.wait()
        self._rounds[slot] = None
