"""Asynchronous pairwise averaging, the communication of AD-PSGD."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ...comm import PeerError, without_traceback
from ...training import ModelAverager, SavedProgress, Status, Traits, check_like
from ..messages import Flags, NeighborExchange
from .pair_messages import _Replies, _Request
from .partners import Partners

REPLIED = 0  # the flag for a reply to the own request; those for neighbors' requests follow


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
    """

    traits = Traits(has_equal_steps=False)

    def __init__(
        self,
        buffers: Sequence[Tensor],
        exchange: NeighborExchange,
        flags: Flags,
        partners: Partners,
        barrier: Callable[[], None],
        timeout: float,
    ) -> None:
        super().__init__(buffers, exchange.run)
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

    @property
    @override
    def status(self) -> Status:
        return Status(self._weight, self._staleness)

    @override
    @torch.no_grad()
    def before_step(self) -> None:
        """Apply the reply found, or reply to the accepted request, before the next update.

        A PeerError of a failed partner is raised again by every later call; a NonFiniteError, of a
        partner's gradient, once the average has been taken.
        """
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
        with self._reraise_failures():
            self._barrier()  # no rank sends requests after this: polling finds all of them
            self._poll_flags()
            if self._replies.active_rank is not None:
                self._replies.reply()
            if self._request.in_flight:  # waits for a rank of higher color: no deadlock
                self._request.apply_reply()
            while self._pending_requests:
                self._replies.accept(self._pending_requests.popleft())
                self._replies.reply()
            self._replies.wait()
            self._barrier()
        self.exchange.headers.raise_nonfinite()

    @override
    @torch.no_grad()
    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """Return z with the reply in flight applied, and w = 1."""
        with self._reraise_failures():
            self._find_reply()
        if not self._request.is_replied:
            return self.buffers, self._weight
        copies = [buffer.clone() for buffer in self.buffers]
        self._request.subtract_from(copies)
        return copies, self._weight

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
            "reply": [each.clone() for each in self._request.received()],
        }

    @override
    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore after the buffers; discard exchanges in flight."""
        parameters = [buffer.clone() for buffer in self.buffers]
        self.flush()
        for buffer, parameter in zip(self.buffers, parameters, strict=True):
            buffer.copy_(parameter)
        self._request.restore(state["num_requests"], state["reply"])
        self._must_accept_next = False

    @override
    def check_state(self, state: dict[str, Any]) -> SavedProgress:
        check_like(state["num_requests"], 0, "algorithm.num_requests")
        if state["reply"]:
            check_like(state["reply"], self.buffers, "algorithm.reply")
        return SavedProgress()

    @override
    def close(self) -> None:
        """Drop exchanges in flight: their handles would keep the process group's threads alive."""
        self._request.abandon()
        self._replies.abandon()

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
        self._barrier()
        self._poll_flags()
        self._barrier()  # no rank replies before all have polled
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
