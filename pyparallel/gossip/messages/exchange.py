"""Rounds of point-to-point messages in one process group."""

import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ...comm.collectives import Collectives
from ...comm.counts import ANY
from ...comm.errors import PeerError
from ...comm.profiling import post, profiled
from ...comm.run import Run
from ...comm.store import timeout_of
from .header import MessageHeaders, RoundHeaders

_NUM_TAGS = 2**30 - 2  # of each kind of message; gloo's tags are 31 bits


class Transfer(NamedTuple):
    """A tensor and the rank in the group, ``peer``, to send it to or receive it from.

    Args:
        is_header: whether ``PendingExchange.wait_for_headers`` waits for it.
        is_difference: whether it is part of a difference to an earlier message.
        is_receipt: whether it tells a sender that its message was merged.
    """

    peer: int
    tensor: Tensor
    is_header: bool = False
    is_difference: bool = False
    is_receipt: bool = False

    @property
    def tag(self) -> int:
        """Return gloo's tag: a message never arrives in a tensor of another kind or length."""
        if self.is_header or self.is_receipt:
            return int(self.is_receipt)
        num_bytes = self.tensor.numel() * self.tensor.element_size()
        return 2 * (1 + num_bytes % _NUM_TAGS) + self.is_difference


@dataclass(eq=False)
class PendingExchange:
    """Messages in flight. Do not touch their tensors until ``wait`` has returned."""

    exchange: "NeighborExchange"
    transfers: Sequence[Transfer]  # their tensors are kept alive while in flight
    num_received: int  # the first of them; the others are sent
    works: InitVar[Sequence[dist.Work]]

    def __post_init__(self, works: Sequence[dist.Work]) -> None:
        self._works = list(enumerate(works))
        self._is_batched = len(works) < len(self.transfers)  # NCCL returns one work for all
        # Gloo's own may be of the time when members connected; with NCCL the host would wait.
        on_cpu = bool(works) and self.transfers[0].tensor.is_cpu
        by_gloo = on_cpu and isinstance(works[0], dist.Work)
        self._timeout = (timeout_of(self.exchange.run.group),) if by_gloo else ()

    def wait_for_headers(self) -> None:
        """Wait as ``wait``, on gloo for the headers that are received only."""
        if not self._is_batched:
            self._wait(lambda index: index < self.num_received and self.transfers[index].is_header)
        else:
            self.wait()

    def wait(self) -> None:
        """Wait until all messages of the round are sent and received.

        On NCCL this makes the current stream wait and returns at once; on gloo the host waits. A
        second call on the same stream does nothing.
        """
        self._wait(lambda index: True)

    def keep(self) -> None:
        """Keep the tensors for good: messages that nobody waits for may still arrive in them."""
        self.exchange.failed.append(self)

    def _wait(self, is_due: Callable[[int], bool]) -> None:
        begin = time.perf_counter()
        for entry in [each for each in self._works if is_due(each[0])]:
            index, work = entry
            try:
                work.wait(*self._timeout)
            except RuntimeError as error:
                self.keep()
                failed, num_received = self.transfers, self.num_received
                if not self._is_batched:
                    failed, num_received = failed[index : index + 1], int(index < num_received)
                raise self.exchange.peer_error(failed, num_received, error) from error
            self._works.remove(entry)
        self.exchange.run.stats.count_wait(time.perf_counter() - begin)


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
        pending: PendingExchange,
        headers: RoundHeaders,
        into: Sequence[Sequence[Tensor]],
        finish: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self._pending, self._headers, self._into = pending, headers, into
        self._finish = finish  # which gets the masses of headers, of messages
        self._received: Received | None = None

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
            with profiled("pyparallel::gossip_wait"):
                self._pending.wait_for_headers()
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


class NeighborExchange:
    """Batched point-to-point sends and receives (``batch_isend_irecv``) in one process group.

    With gloo, a message that another program of the group sends with the same tag, and that is
    longer than the tensor that awaits it, ends the receiving process: gloo aborts it ("terminate
    called"). So a trainer has a group of its own, where no other messages are, and tags of payloads
    differ by length and kind: messages that do not match wait, and their headers tell why.

    The group of ``run`` has the rank numbers of peers. Without counts in headers, ranks may step at
    their own pace. ``failed`` are rounds whose messages may still arrive. After a round
    ``headers.raise_nonfinite()`` raises for nan or inf in gradients of its senders.
    """

    def __init__(self, run: Run, *, has_counts: bool = True) -> None:
        self.run = run
        self.rank, self.num_ranks, self.me = run.group_rank, run.size, run.rank
        self.collectives = Collectives(run, run.stats)
        self.failed: list[PendingExchange] = []
        self.headers = MessageHeaders(run, has_counts=has_counts)

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

        A header goes beside each message. A second ``swap`` may begin before the first is waited
        for; messages between two ranks match in the order in which rounds are started.

        Args:
            tensors: the message, which is not copied; empty: only to receive.
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
        return Round(pending, headers, into, finish)

    def start(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> PendingExchange:
        """Start a round; transfers between two ranks match in the order in which they are listed.

        A tensor to receive into has the length and the dtype that is sent: one of another length is
        never received.
        """
        # Receives first: gloo announces a posted receive to its sender on the connection that our
        # own data use. Announced after the data, two ranks that exchange would send in turn.
        operations = [
            dist.P2POp(kind, each.tensor, group=self.run.group, tag=each.tag, group_peer=each.peer)
            for kind, transfers in ((dist.irecv, receives), (dist.isend, sends))
            for each in transfers
        ]
        transfers = [*receives, *sends]
        try:
            works = post(dist.batch_isend_irecv, operations) if operations else []
        except RuntimeError as error:
            raise self.peer_error(transfers, len(receives), error) from error
        sizes = (each.tensor.numel() * each.tensor.element_size() for each in sends)
        self.run.stats.count_bytes(sum(sizes))
        return PendingExchange(self, transfers, len(receives), works)

    def finish_sum(self, started: _AllReduce, masses: Tensor) -> Tensor:
        """Wait for the sum of all ranks' messages; make one message, in it, of the others'.

        Return the mass of that message, (1,): 0, which leaves it out, if one of the ``masses`` of
        the others, (n - 1,), is 0 because a header was not what it must be.
        """
        self.collectives.finish_all_reduce(started.future)
        others = masses.sum()
        started.total.sub_(started.sent * started.mass).div_(others)
        return torch.where((masses > 0).all(), others, 0).view(1)

    def peer_error(
        self, transfers: Sequence[Transfer], num_received: int, error: RuntimeError
    ) -> PeerError:
        """Return the error of undelivered messages, of which the first are to be received."""
        peers = [self.run.global_rank(transfer.peer) for transfer in transfers]
        edges = [(peer, self.me) for peer in peers[:num_received]]
        edges += [(self.me, peer) for peer in peers[num_received:]]
        names = ", ".join(f"{sender} -> {receiver}" for sender, receiver in dict.fromkeys(edges))
        return self.run.error(
            f"the message on edge {names} was not delivered",
            error,
            suspects=[peer for edge in edges for peer in edge],
            otherwise="took fewer steps: use join()",
        )


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
        transfers.append(Transfer(peer, header, is_header=True))
        parts = [each for each in messages[index] if each.numel()] if messages else []
        differs = are_differences[index]
        transfers += [Transfer(peer, each, is_difference=differs) for each in parts]
    return transfers


def _signed_bytes(message: Sequence[Tensor], is_difference: bool) -> int:
    """Return the length of a message in its header: bytes, negative for a difference."""
    num_bytes = sum(each.numel() * each.element_size() for each in message)
    return -num_bytes if is_difference else num_bytes
