"""Asynchronous pairwise averaging, the communication of AD-PSGD."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join
from typing_extensions import override

from ...comm import (
    ANY,
    Flags,
    ModelAverager,
    NeighborExchange,
    PeerError,
    PendingExchange,
    RoundHeaders,
    Transfer,
    check_like,
    raising_peer_errors,
    without_traceback,
)
from ...comm.model_averager import NOTIFYING
from ..push_sum.buffer import receive
from .partners import Partners

REPLIED = 0  # the flag for a reply to the own request; those for neighbors' requests follow
NUM_RECEIVE_BUFFERS = 2


class PairwiseAverager(ModelAverager):
    """Asynchronous averaging of a rank with one neighbor at a time, as in AD-PSGD.

    The active rank of a pair sends its z as a request and continues training. The passive rank
    accepts a request at the end of a step and receives it during its next step; then it computes
    d = z_active - z, adds d / 2 to its own z and replies with d. The active rank subtracts d / 2
    once it has received the reply. Both changes are equal and opposite, so the sum over ranks is
    conserved whatever updates happen in between.

    While its request is in flight a rank neither sends nor accepts another one: except for its own
    updates, its z is then what it has sent, so every exchange averages exactly two ranks, whatever
    the delays. A rank with pending requests accepts one before it sends its own next request.

    A rank waits only for messages that a flag has announced as sent, after they had a whole step to
    arrive. It may have many pending requests; it replies to one a step.

    Memory beyond z, in copies of z: one on active ranks (for the request, then for the reply), two
    on passive ranks (one receives while the last reply is sent from the other).

    Args:
        buffers: flat buffers that hold z; written in place.
        exchange: sends to and receives from the neighbors; used by nothing else.
        flags: of this rank: one for replies, and one for each neighbor that may send requests.
        partners: which rank of each pair is active.
        barrier: returns once all ranks have called it with their steps.
        timeout: in seconds; a passive rank must reply within it.
        process_group: the ranks that train together; None: the default group.
    """

    can_be_inner = False
    has_equal_steps = False

    def __init__(
        self,
        buffers: Sequence[Tensor],
        exchange: NeighborExchange,
        flags: Flags,
        partners: Partners,
        barrier: Callable[[int], None],
        timeout: float,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(buffers, process_group)
        self.exchange = exchange
        self._flags = flags
        self._partners = partners
        self._active_neighbors = partners.active_neighbors(exchange.rank)
        self._is_active = bool(partners.passive_neighbors(exchange.rank))
        self._barrier = barrier
        self._timeout = timeout
        self._request = _Request(self.buffers, exchange)
        self._replies = _Replies(self.buffers, exchange)
        self._pending_requests: deque[int] = deque()
        self._must_accept_next = False
        self._num_steps = self._started_at = self._staleness = 0  # of the exchange
        self._failure: PeerError | None = None
        self._join_work: dist.Work | None = None

    @property
    @override
    def bytes_sent(self) -> int:
        return self.exchange.bytes_sent

    @property
    @override
    def waiting_seconds(self) -> float:
        return super().waiting_seconds + self.exchange.waiting_seconds

    @property
    @override
    def staleness(self) -> int:
        """Steps of this rank since it has sent its request, or accepted the neighbor's."""
        return self._staleness

    @override
    @torch.no_grad()
    def before_step(self) -> None:
        """Apply the reply found, or reply to the accepted request, before the next update.

        Raises:
            PeerError: a partner failed; every later call raises the same error.
            NonFiniteError: a partner's gradient was not finite; the average has been taken.
        """
        self._write_counts()
        self._num_steps += 1
        with self._reraise_failures():
            if self._request.is_replied:
                self._request.apply_reply()
                self._staleness = self._num_steps - self._started_at
            if self._replies.active_rank is not None:
                self._staleness = self._num_steps - self._started_at
                self._flags.raise_for(self._replies.reply(), REPLIED)
        self.exchange.headers.raise_nonfinite()

    @override
    @torch.no_grad()
    def after_step(self) -> None:
        """Poll the flags; unless a request is in flight, accept a pending one or send one.

        Raises:
            PeerError: a partner failed or has not replied in time.
        """
        self._write_counts()
        with self._reraise_failures():
            self._poll_flags()
            if self._request.in_flight:
                self._request.check(self._timeout)
            elif self._pending_requests and (self._must_accept_next or not self._is_active):
                self._replies.accept(self._pending_requests.popleft())
                self._started_at, self._must_accept_next = self._num_steps, False
            elif self._is_active:
                self._send_request()
                self._started_at, self._must_accept_next = self._num_steps, True

    @override
    @torch.no_grad()
    def flush(self) -> None:
        """Complete all exchanges; all ranks must call it together.

        Raises:
            PeerError: a rank failed.
        """
        with self._reraise_failures():
            self._barrier(
                self.counts.steps
            )  # no rank sends requests after this: polling finds all of them
            self._poll_flags()
            if self._replies.active_rank is not None:
                self._replies.reply()
            if self._request.in_flight:  # waits for a rank of higher color: no deadlock
                self._request.apply_reply()
            while self._pending_requests:
                self._replies.accept(self._pending_requests.popleft())
                self._replies.reply()
            self._replies.wait()
            self._barrier(self.counts.steps)
        self.exchange.headers.raise_nonfinite()

    @override
    @torch.no_grad()
    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """Return z with the reply in flight applied, and w = 1; change nothing.

        All ranks must call it together. A request without a reply has no effect yet.
        """
        with self._reraise_failures():
            self._find_reply()
        if not self._request.is_replied:
            return self.buffers, self.weight
        copies = [buffer.clone() for buffer in self.buffers]
        self._request.subtract_from(copies)
        return copies, self.weight

    @override
    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the number of requests sent and the reply in flight; all ranks call it together.

        Together with the parameters of all ranks, read without a step in between, it conserves the
        sum. A request without a reply has no effect yet and is left out. Resuming is not bitwise
        reproducible: exchanges may happen at other steps.
        """
        with self._reraise_failures():
            self._find_reply()
        return {
            "num_requests": self._request.index,
            "answer": [each.clone() for each in self._request.received()],
        }

    @override
    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned; all ranks call it together.

        The buffers must hold the restored parameters already. Exchanges in flight are discarded.
        """
        parameters = [buffer.clone() for buffer in self.buffers]
        self.flush()
        for buffer, parameter in zip(self.buffers, parameters, strict=True):
            buffer.copy_(parameter)
        self._request.restore(state["num_requests"], state["answer"])
        self._must_accept_next = False

    @override
    def check_state(self, state: dict[str, Any]) -> None:
        check_like(state["num_requests"], 0, "algorithm.num_requests")
        if state["answer"]:
            check_like(state["answer"], self.buffers, "algorithm.answer")

    @override
    def close(self) -> None:
        """Drop exchanges in flight: their handles would keep the process group's threads alive."""
        self._request.abandon()
        self._replies.abandon()
        self._join_work = None

    @override
    def notify_joined_ranks(self) -> None:
        """Start the next all-reduce of the join context once the last one has completed.

        A step never waits for it. A rank without batches may reply each time the slowest rank has
        taken a step.
        """
        if self._join_work is None or self._join_work.is_completed():
            with raising_peer_errors(self.process_group, self.counts.steps, NOTIFYING):
                self._join_work = Join.notify_join_context(self)

    def _write_counts(self) -> None:
        """Leave the numbers of steps out of headers: every rank trains at its own pace."""
        counts = replace(self.counts, steps=ANY, repeats=ANY, forwards=ANY)
        self.exchange.headers.counts = counts
        self.exchange.counts = self.counts  # requests are no steps

    def _poll_flags(self) -> None:
        for flag in self._flags.look():
            if flag == REPLIED:
                if not self._request.in_flight:
                    raise self._flags.foreign_error("a reply to no request")
                self._request.is_replied = True
            else:
                self._pending_requests.append(self._active_neighbors[flag - 1])

    def _find_reply(self) -> None:
        """Find whether the own request has a reply, at one point in time for all ranks."""
        self._barrier(self.counts.steps)
        self._poll_flags()
        self._barrier(self.counts.steps)  # no rank replies before all have polled
        self._request.wait_if_replied()

    def _send_request(self) -> None:
        rank = self.exchange.rank
        peer = self._partners.choose(rank, self._request.index)
        self._request.send(peer)
        self._flags.raise_for(peer, 1 + self._partners.active_neighbors(peer).index(rank))

    @contextmanager
    def _reraise_failures(self) -> Iterator[None]:
        if self._failure is not None:
            raise without_traceback(self._failure)
        try:
            yield
        except PeerError as error:
            self._failure = without_traceback(error)
            raise


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
        self._pending: PendingExchange | None = None
        self._headers: RoundHeaders | None = None
        self._sent_at = 0.0

    @property
    def in_flight(self) -> bool:
        return self._pending is not None or self.is_replied

    def send(self, peer: int) -> None:
        self._allocate()
        for message, buffer in zip(self._messages, self._buffers, strict=True):
            message.copy_(buffer)
        with torch.profiler.record_function("pyparallel::gossip_send"):
            headers = _headers_of(self._exchange, self.index, self._messages, 1, [peer])
            transfers = [Transfer(peer, message) for message in self._messages]
            # The receive is posted before the passive rank sees the request: replies never block.
            self._pending = self._exchange.start(
                [Transfer(peer, headers.sent[0], is_header=True), *transfers],
                [Transfer(peer, headers.received[0], is_header=True), *transfers],
                step=self.index,
            )
            self._headers = headers
        self._sent_at = time.monotonic()
        self.index += 1

    def check(self, timeout: float) -> None:
        if not self.is_replied and time.monotonic() - self._sent_at > timeout:
            self._wait()  # raises for a dead peer now, for a silent one after the group's timeout

    def apply_reply(self) -> None:
        self._wait()
        with torch.profiler.record_function("pyparallel::gossip_merge"):
            self.subtract_from(self._buffers)
        self._pending, self.is_replied = None, False

    def wait_if_replied(self) -> None:
        if self.is_replied:
            self._wait()

    def subtract_from(self, buffers: Sequence[Tensor]) -> None:
        for buffer, difference in zip(buffers, self._messages, strict=True):
            buffer.add_(difference, alpha=-0.5)

    def received(self) -> list[Tensor]:
        return self._messages if self.is_replied else []

    def restore(self, index: int, received: Sequence[Tensor]) -> None:
        self.index, self._pending, self.is_replied = index, None, bool(received)
        if received:
            self._allocate()
            for message, difference in zip(self._messages, received, strict=True):
                message.copy_(difference)

    def abandon(self) -> None:
        self._pending = None

    def _allocate(self) -> None:
        if not self._messages:
            self._messages = [torch.empty_like(buffer) for buffer in self._buffers]

    def _wait(self) -> None:
        if self._pending is not None and self._headers is not None:
            with torch.profiler.record_function("pyparallel::gossip_wait"):
                receive(self._pending, self._headers)
            self._headers = None


class _Replies:
    """The requests that this rank accepts as the passive one, and its replies, one at a time."""

    def __init__(self, buffers: Sequence[Tensor], exchange: NeighborExchange) -> None:
        self.active_rank: int | None = None
        self._buffers = buffers
        self._exchange = exchange
        self._num_replies = 0
        self._receive_buffers: list[list[Tensor]] = []
        self._pending: list[PendingExchange | None] = [None] * NUM_RECEIVE_BUFFERS
        self._headers: RoundHeaders | None = None  # of the accepted request

    @property
    def _slot(self) -> int:
        return self._num_replies % NUM_RECEIVE_BUFFERS

    def accept(self, active_rank: int) -> None:
        """Start to receive the request of ``active_rank``."""
        if len(self._receive_buffers) < NUM_RECEIVE_BUFFERS:
            self._receive_buffers.append([torch.empty_like(buffer) for buffer in self._buffers])
        self._wait_for(self._slot)  # the reply before the last may still be in flight from there
        messages = self._receive_buffers[self._slot]
        self._headers = _headers_of(self._exchange, ANY, messages, 0, [active_rank])
        receives = [Transfer(active_rank, self._headers.received[0], is_header=True)]
        receives += [Transfer(active_rank, message) for message in messages]
        self._pending[self._slot] = self._exchange.start([], receives, step=self._num_replies)
        self.active_rank = active_rank

    def reply(self) -> int:
        """Average with the received request, send d as the reply, and return the active rank."""
        assert self.active_rank is not None
        active_rank, self.active_rank = self.active_rank, None
        request = self._receive()
        messages = self._receive_buffers[self._slot]
        with torch.profiler.record_function("pyparallel::gossip_merge"):
            for buffer, message in zip(self._buffers, messages, strict=True):
                message.sub_(buffer)
                buffer.add_(message, alpha=0.5)
        headers = _headers_of(self._exchange, request, messages, 1, [])
        sends = [Transfer(active_rank, headers.sent[0], is_header=True)]
        sends += [Transfer(active_rank, message) for message in messages]
        with torch.profiler.record_function("pyparallel::gossip_send"):
            self._pending[self._slot] = self._exchange.start(sends, [], step=self._num_replies)
        self._num_replies += 1
        return active_rank

    def _receive(self) -> int:
        """Wait for the accepted request, and return its number."""
        pending, headers = self._pending[self._slot], self._headers
        assert pending is not None
        assert headers is not None
        with torch.profiler.record_function("pyparallel::gossip_wait"):
            receive(pending, headers)
        self._pending[self._slot] = None
        return headers.round_index

    def wait(self) -> None:
        """Wait until all replies have been sent."""
        for slot in range(NUM_RECEIVE_BUFFERS):
            self._wait_for(slot)

    def abandon(self) -> None:
        self._pending = [None] * NUM_RECEIVE_BUFFERS

    def _wait_for(self, slot: int) -> None:
        pending = self._pending[slot]
        if pending is not None:
            with torch.profiler.record_function("pyparallel::gossip_wait"):
                pending.wait()
        self._pending[slot] = None


def _headers_of(
    exchange: NeighborExchange,
    request: int,
    messages: Sequence[Tensor],
    num_sends: int,
    senders: Sequence[int],
) -> RoundHeaders:
    length = sum(message.numel() * message.element_size() for message in messages)
    masses = messages[0].new_ones(num_sends, dtype=torch.float64)
    masses_in = (1.0,) * len(senders)
    return exchange.headers.of_round(request, masses, length, senders, masses_in=masses_in)
