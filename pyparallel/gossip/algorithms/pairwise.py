"""Averaging in pairs while both go on training: mechanism, with no opinion on who asks whom."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...comm import Flags, NeighborExchange, PeerError, PendingExchange, Transfer
from .partners import Partners

ANSWERED = 0  # the flag of a rank's own request; those of its askers follow
NUM_INBOXES = 2


class PairwiseRounds:
    """Asynchronous averaging of a rank with one neighbor at a time: the rounds of AD-PSGD.

    A rank that asks sends its z and goes on. A rank that finds itself asked, at the end of a step,
    lets the message travel during its next step, then takes d = z_asker - z, adds d / 2 to its own
    z and sends d back; the asker subtracts d / 2 as soon as it finds the answer. Both changes are
    equal and opposite, so the sum over ranks is conserved whatever both have done in between.

    While its request is under way a rank neither asks nor answers: but for its own steps its z is
    then what it has sent, and every exchange averages two ranks and leaves the others alone,
    whatever the delays. Who has let somebody wait answers before it asks again.

    Nobody waits for a rank, only for messages that have been announced by a flag as sent: for what
    is left of the way after a whole step. Rank i may be asked by many; it answers one a step.

    Memory beyond z, in copies of z: one on ranks that ask (the request leaves from it, and the
    answer returns into it), two on ranks that answer (one receives while from the other the last
    answer leaves).

    Args:
        buffers: flat buffers that hold z; written in place.
        exchange: the way to the neighbors, used by nothing else.
        flags: news from them: 1 flag for answers, and one for each rank that may ask this one.
        partners: who may ask whom.
        meet: returns once all ranks have called it.
        patience: in seconds; who has been asked must answer within it.
    """

    def __init__(
        self,
        buffers: Sequence[Tensor],
        exchange: NeighborExchange,
        flags: Flags,
        partners: Partners,
        meet: Callable[[], None],
        patience: float,
    ) -> None:
        self.buffers = list(buffers)
        self.exchange = exchange
        self.weight = torch.ones((), dtype=torch.float64, device=self.buffers[0].device)
        self._flags = flags
        self._partners = partners
        self._askers = partners.askers_of(exchange.rank)
        self._may_ask = bool(partners.asked_by(exchange.rank))
        self._meet = meet
        self._patience = patience
        self._request = _Request(self.buffers, exchange)
        self._answers = _Answers(self.buffers, exchange)
        self._waiting: deque[int] = deque()
        self._owes_answer = False
        self._failure: PeerError | None = None

    @property
    def bytes_sent(self) -> int:
        """Requests and answers sent so far."""
        return self.exchange.bytes_sent

    def closure_error(self) -> str | None:
        """None: weights stay 1."""
        return None

    def settle(self) -> None:
        """Nothing: the buffers always hold z."""

    @torch.no_grad()
    def begin(self) -> None:
        """Take the answer, or give the one, whose message had the last step's time to travel.

        Raises:
            PeerError: a partner is gone; every later call raises the same.
        """
        with self._remembering_failures():
            if self._request.is_answered:
                self._request.take()
            if self._answers.asker is not None:
                self._flags.raise_for(self._answers.give(), ANSWERED)

    def enter_update(self) -> None:
        """Nothing: updates act on z."""

    def leave_update(self) -> None:
        """Nothing."""

    @torch.no_grad()
    def end(self) -> None:
        """Look for news, and unless a request is under way attend to another one or ask.

        Raises:
            PeerError: a partner is gone or has not answered in time.
        """
        with self._remembering_failures():
            self._look()
            if self._request.under_way:
                self._request.check(self._patience)
            elif self._waiting and (self._owes_answer or not self._may_ask):
                self._answers.attend(self._waiting.popleft())
                self._owes_answer = False
            elif self._may_ask:
                self._ask()
                self._owes_answer = True

    @torch.no_grad()
    def flush(self) -> None:
        """End all exchanges; all ranks must call it together.

        Raises:
            PeerError: a rank is gone.
        """
        with self._remembering_failures():
            self._meet()  # from here on nobody asks: a look finds all who did
            self._look()
            if self._answers.asker is not None:
                self._answers.give()
            if self._request.under_way:  # whoever it waits for has a higher color
                self._request.take()
            while self._waiting:
                self._answers.attend(self._waiting.popleft())
                self._answers.give()
            self._answers.wait()
            self._meet()

    @torch.no_grad()
    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """What z would be with the answer under way taken; all ranks must call it together.

        Requests that nobody has averaged with yet carry nothing. Nothing changes.
        """
        with self._remembering_failures():
            self._find_answer()
        if not self._request.is_answered:
            return self.buffers, self.weight
        copies = [buffer.clone() for buffer in self.buffers]
        self._request.subtract_from(copies)
        return copies, self.weight

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The number of requests made, and the answer under way; all ranks call it together.

        With the parameters of all ranks, read without a step in between, it conserves the sum. A
        request without an answer carries nothing and is left out. When messages arrive is not up
        to a checkpoint: after a resume exchanges may fall on other steps.
        """
        with self._remembering_failures():
            self._find_answer()
        return {
            "num_requests": self._request.index,
            "answer": [each.clone() for each in self._request.arrived()],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; all ranks call it together, with their parameters as they are to be.

        Exchanges under way are ended without effect.
        """
        parameters = [buffer.clone() for buffer in self.buffers]
        self.flush()
        for buffer, parameter in zip(self.buffers, parameters, strict=True):
            buffer.copy_(parameter)
        self._request.restore(state["num_requests"], state["answer"])
        self._owes_answer = False

    def restart(self) -> None:
        """Nothing: flush has ended all exchanges."""

    def drop(self) -> None:
        """Forget what is under way: its handles would keep the process group's threads alive."""
        self._request.drop()
        self._answers.drop()

    def _look(self) -> None:
        for flag in self._flags.look():
            if flag == ANSWERED:
                self._request.is_answered = True
            else:
                self._waiting.append(self._askers[flag - 1])

    def _find_answer(self) -> None:
        """Know whether the own request has been answered, at one moment for all ranks."""
        self._meet()
        self._look()
        self._meet()  # nobody answers before all have looked
        self._request.wait_if_answered()

    def _ask(self) -> None:
        rank = self.exchange.rank
        peer = self._partners.choose(rank, self._request.index)
        self._request.send(peer)
        self._flags.raise_for(peer, 1 + self._partners.askers_of(peer).index(rank))

    @contextmanager
    def _remembering_failures(self) -> Iterator[None]:
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except PeerError as error:
            self._failure = error
            raise


class _Request:
    """A rank's own request: z on the way out, and on the way back how far z was from the other's.

    Both ways use one copy of z: the answer begins to arrive when all of the request has left.
    """

    def __init__(self, buffers: Sequence[Tensor], exchange: NeighborExchange) -> None:
        self.index = 0
        self.is_answered = False
        self._buffers = buffers
        self._exchange = exchange
        self._messages: list[Tensor] = []
        self._round: PendingExchange | None = None
        self._sent_at = 0.0

    @property
    def under_way(self) -> bool:
        return self._round is not None or self.is_answered

    def send(self, peer: int) -> None:
        self._make_room()
        for message, buffer in zip(self._messages, self._buffers, strict=True):
            message.copy_(buffer)
        with torch.profiler.record_function("pyparallel::gossip_send"):
            transfers = [Transfer(peer, message) for message in self._messages]
            # The way back is open before the other can know of the request: an answer never waits.
            self._round = self._exchange.start(transfers, transfers, step=self.index)
        self._sent_at = time.monotonic()
        self.index += 1

    def check(self, patience: float) -> None:
        if not self.is_answered and time.monotonic() - self._sent_at > patience:
            self._wait()  # names who died at once, and who is silent after the group's timeout

    def take(self) -> None:
        self._wait()
        with torch.profiler.record_function("pyparallel::gossip_merge"):
            self.subtract_from(self._buffers)
        self._round, self.is_answered = None, False

    def wait_if_answered(self) -> None:
        if self.is_answered:
            self._wait()

    def subtract_from(self, buffers: Sequence[Tensor]) -> None:
        for buffer, difference in zip(buffers, self._messages, strict=True):
            buffer.add_(difference, alpha=-0.5)

    def arrived(self) -> list[Tensor]:
        return self._messages if self.is_answered else []

    def restore(self, index: int, arrived: Sequence[Tensor]) -> None:
        self.index, self._round, self.is_answered = index, None, bool(arrived)
        if arrived:
            self._make_room()
            for message, difference in zip(self._messages, arrived, strict=True):
                message.copy_(difference)

    def drop(self) -> None:
        self._round = None

    def _make_room(self) -> None:
        if not self._messages:
            self._messages = [torch.empty_like(buffer) for buffer in self._buffers]

    def _wait(self) -> None:
        if self._round is not None:
            with torch.profiler.record_function("pyparallel::gossip_wait"):
                self._round.wait()


class _Answers:
    """What a rank does for those that ask it, one at a time."""

    def __init__(self, buffers: Sequence[Tensor], exchange: NeighborExchange) -> None:
        self.asker: int | None = None
        self._buffers = buffers
        self._exchange = exchange
        self._num_attended = 0
        self._inboxes: list[list[Tensor]] = []
        self._rounds: list[PendingExchange | None] = [None] * NUM_INBOXES

    @property
    def _slot(self) -> int:
        return self._num_attended % NUM_INBOXES

    def attend(self, asker: int) -> None:
        """Let the request of an asker come in."""
        if len(self._inboxes) < NUM_INBOXES:
            self._inboxes.append([torch.empty_like(buffer) for buffer in self._buffers])
        self._wait_for(self._slot)  # the last answer but one still leaves from there
        receives = [Transfer(asker, message) for message in self._inboxes[self._slot]]
        self._rounds[self._slot] = self._exchange.start([], receives, step=self._num_attended)
        self.asker = asker

    def give(self) -> int:
        """Average with the request that has come in, send the difference back; to whom."""
        assert self.asker is not None
        asker, self.asker = self.asker, None
        self._wait_for(self._slot)
        messages = self._inboxes[self._slot]
        with torch.profiler.record_function("pyparallel::gossip_merge"):
            for buffer, message in zip(self._buffers, messages, strict=True):
                message.sub_(buffer)
                buffer.add_(message, alpha=0.5)
        sends = [Transfer(asker, message) for message in messages]
        with torch.profiler.record_function("pyparallel::gossip_send"):
            self._rounds[self._slot] = self._exchange.start(sends, [], step=self._num_attended)
        self._num_attended += 1
        return asker

    def wait(self) -> None:
        """Wait until all answers have left."""
        for slot in range(NUM_INBOXES):
            self._wait_for(slot)

    def drop(self) -> None:
        self._rounds = [None] * NUM_INBOXES

    def _wait_for(self, slot: int) -> None:
        under_way = self._rounds[slot]
        if under_way is not None:
            with torch.profiler.record_function("pyparallel::gossip_wait"):
                under_way.wait()
        self._rounds[slot] = None
