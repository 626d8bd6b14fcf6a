"""Rounds of point-to-point messages in one process group."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from ...comm.collectives import Collectives
from ...comm.counts import ANY
from ...comm.errors import PeerError
from ...comm.p2p import Pending, PointToPoint, Transfer
from ...comm.profiling import profiled
from ...comm.run import Run
from .header import MessageHeaders, RoundHeaders
from .sm_carveout import leave_sms, num_network_sms

MESSAGE, DIFFERENCE, HEADER, RECEIPT = range(4)
"""Kinds of transfers: of a message, of a difference to an earlier one, of a header, which
``Round.wait`` waits for first, and of what tells a sender that its message was merged."""


class Received(NamedTuple):
    """The messages of a round, which have arrived.

    Args:
        messages: the tensors of each message, by sender.
        masses: (m,) float64, of the messages. On a GPU 0 if one is not what it must be: do not use
            its tensors.
    """

    messages: Sequence[Sequence[Tensor]]
    masses: Tensor

    def first_or(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Return the first message; instead of one that must not be used, other tensors."""
        message = self.messages[0]
        if not self.masses.is_cuda:  # the CPU has raised an error
            return list(message)
        is_valid = self.masses[0] > 0
        return [torch.where(is_valid, *each) for each in zip(message, own, strict=True)]


class Round:
    """A round of messages in flight, as ``NeighborExchange.swap`` returns it.

    Do not write the tensors that are sent, and do not read those that are received, until ``wait``
    has returned.
    """

    def __init__(
        self,
        pending: Pending,
        headers: RoundHeaders,
        into: Sequence[Sequence[Tensor]],
        finish: Callable[[Tensor], Tensor] | None,
        num_sms: int = 0,
    ) -> None:
        self._pending, self._headers, self._into = pending, headers, into
        self._finish = finish  # which gets the masses of headers, of messages
        self._received: Received | None = None
        self._release_sms = leave_sms(num_sms, self) if num_sms else None

    @property
    def round_index(self) -> int:
        """The round in the header of the first sender, which has arrived."""
        return self._headers.round_index

    def wait(self) -> Received:
        """Wait until all is sent and received, headers first; return what is received.

        On NCCL this makes the current stream wait and returns at once; on gloo the host waits. If
        it is interrupted it can be repeated; once it has returned, it returns the same.
        """
        if self._received is None:
            if self._release_sms is not None:
                self._release_sms()
            with profiled("pyparallel::gossip_wait"):
                self._pending.wait(HEADER)
                try:
                    masses = self._headers.check()
                except PeerError:
                    self._pending.keep()
                    raise
                self._pending.wait()
                if self._finish is not None:
                    masses = self._finish(masses)
            self._received = Received(self._into, masses)
        return self._received


class _AllReduce(NamedTuple):
    """The sum of all ranks' messages, each times its mass: what is in flight, and this rank's."""

    future: Future[Any]
    total: Tensor
    sent: Tensor
    mass: Tensor


class NeighborExchange(PointToPoint):
    """Rounds of messages to and from neighbors in one process group.

    With gloo, a message that another program of the group sends with the same tag, and that is
    longer than the tensor that awaits it, ends the receiving process: gloo aborts it ("terminate
    called"). So a trainer has a group of its own, where no other messages are, and tags of payloads
    differ by length and kind: messages that do not match wait, and their headers tell why.

    The group of ``run`` has the rank numbers of peers. Without counts in headers, ranks may step at
    their own pace. After a round ``headers.raise_nonfinite()`` raises for nan or inf in gradients
    of its senders.
    """

    def __init__(self, run: Run, *, has_counts: bool = True) -> None:
        super().__init__(run, otherwise="took fewer steps: use join()")
        self.rank, self.num_ranks, self.me = run.group_rank, run.size, run.rank
        self.collectives = Collectives(run, run.stats)
        self.headers = MessageHeaders(run, has_counts=has_counts)
        self._num_sms = num_network_sms(run.group)

    def reserve(self, messages: Sequence[Sequence[int]], device: torch.device) -> Tensor | None:
        """Prepare for messages whose parts have so many bytes each, of one round at a time.

        Return memory, uint8, in which a message of one part is best written; None: anywhere.
        """
        return None

    def swap(
        self,
        tensors: Sequence[Tensor],
        to: Sequence[int],
        from_: Sequence[int],
        *,
        into: Sequence[Sequence[Tensor]] | None = None,
        round_index: int = ANY,
        masses: Tensor | None = None,
        masses_in: Sequence[float] = (),
        is_difference: bool = False,
        are_differences: Sequence[bool] | None = None,
        by_all_reduce: bool = False,
    ) -> Round:
        """Start a round: send a message to ranks, and receive one from others.

        A header goes beside each message. Only ranks with something to send or to receive call
        this. A second ``swap`` may begin before the first is waited for; messages between two ranks
        match in the order in which rounds are started.

        Args:
            tensors: the message, which is not copied; empty: only to receive.
            to: ranks, each of which has this one in its ``from_``; ValueError for itself.
            into: tensors to receive each message into; None: new ones like ``tensors``.
            round_index: of the round; ``ANY``: not compared.
            masses: (k,) float64, of the message to each receiver; None: 1, received messages too.
            masses_in: of the messages to receive; empty: any that can be.
            is_difference: the message is a difference to an earlier one.
            are_differences: whether each message to receive is one; None: as long as this one.
            by_all_reduce: all ranks send one float32 tensor to all others, with equal masses; add
                them by an all-reduce, of fewer bytes. What is received is one message, the others'
                average.
        """
        me, all_ranks = self.run.group_rank, range(self.run.size)
        if wrong := [peer for peer in (*to, *from_) if peer == me or peer not in all_ranks]:
            rule = f"to and from_ on rank {me} must be other ranks, below {len(all_ranks)}"
            raise ValueError(f"{rule}, got {wrong[0]}")
        if into is None:
            into = [[torch.empty_like(each) for each in tensors] for _ in from_]
        if masses is None:
            masses = (tensors or into[0])[0].new_ones(len(to), dtype=torch.float64)
            masses_in = (1.0,) * len(from_)
        differ = [False] * len(from_) if are_differences is None else are_differences
        message = tensors or (into[0] if into and are_differences is None else ())
        length = _signed_bytes(message, is_difference)
        lengths = list(map(_signed_bytes, into, differ)) if are_differences else None
        headers = self.headers.of_round(round_index, masses, length, from_, lengths, masses_in)
        sent, received = ([], []) if by_all_reduce else ([tensors] * len(to), into)
        sends = _transfers(to, headers.sent, sent, [is_difference] * len(to))
        receives = _transfers(from_, headers.received, received, differ)
        finish = None
        with profiled("pyparallel::gossip_send"):
            pending = self.start(sends, receives)
            if by_all_reduce:
                total = torch.mul(tensors[0], masses[0], out=into[0][0])
                future = self.collectives.start_all_reduce_(total)
                started = _AllReduce(future, total, tensors[0], masses[0])
                finish = partial(self.finish_sum, started)
        return Round(pending, headers, into, finish, self._num_sms)

    def finish_sum(self, started: _AllReduce, masses: Tensor) -> Tensor:
        """Wait for the sum of all ranks' messages; make one message, in it, of the others'.

        Return the mass of that message, (1,): 0, which leaves it out, if one of the ``masses`` of
        the others, (n - 1,), is 0 because a header was not what it must be.
        """
        self.collectives.finish_all_reduce(started.future)
        others = masses.sum()
        started.total.sub_(started.sent * started.mass).div_(others)
        return torch.where((masses > 0).all(), others, 0).view(1)


def _transfers(
    peers: Sequence[int],
    headers: Tensor,
    messages: Sequence[Sequence[Tensor]],
    are_differences: Sequence[bool],
) -> list[Transfer]:
    """Return the transfers of a header, a row, and a message for each peer.

    Without messages they are those of the headers alone.
    """
    transfers = []
    for index, (peer, header) in enumerate(zip(peers, headers, strict=True)):
        transfers.append(Transfer(peer, header, HEADER))
        parts = [each for each in messages[index] if each.numel()] if messages else []
        kind = DIFFERENCE if are_differences[index] else MESSAGE
        transfers += [Transfer(peer, each, kind) for each in parts]
    return transfers


def _signed_bytes(message: Sequence[Tensor], is_difference: bool) -> int:
    """Return the length of a message in its header: bytes, negative for a difference."""
    num_bytes = sum(each.numel() * each.element_size() for each in message)
    return -num_bytes if is_difference else num_bytes
