"""Rounds of point-to-point messages in one process group."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from .collectives import Collectives
from .errors import PeerError
from .failures import peer_error
from .message_header import MessageHeaders
from .step_hook import StepCounts

_NUM_TAGS = 2**30 - 2  # of each kind of message; gloo's tags are 31 bits


class Transfer(NamedTuple):
    """A tensor and the rank in the group to send it to or receive it from.

    Args:
        peer: the rank.
        tensor: what is sent or received.
        is_header: whether ``PendingExchange.wait_for_headers`` waits for it.
        is_difference: whether it is part of a difference to an earlier message.
    """

    peer: int
    tensor: Tensor
    is_header: bool = False
    is_difference: bool = False

    @property
    def tag(self) -> int:
        """Return gloo's tag: a message never arrives in a tensor of another kind or length."""
        if self.is_header:
            return 0
        num_bytes = self.tensor.numel() * self.tensor.element_size()
        return 2 * (1 + num_bytes % _NUM_TAGS) + self.is_difference


class PendingExchange:
    """Messages in flight. Do not touch their tensors until ``wait`` has returned."""

    def __init__(
        self,
        exchange: "NeighborExchange",
        step: int,
        transfers: Sequence[Transfer],
        edges: Sequence[tuple[int, int]],
        works: Sequence[dist.Work],
    ) -> None:
        self._exchange = exchange
        self._step = step
        self._transfers = transfers  # their tensors are kept alive while in flight
        self._edges = edges
        self._works = list(enumerate(works))
        self._is_batched = len(works) < len(transfers)  # NCCL returns one work for all

    def wait_for_headers(self) -> None:
        """Wait as ``wait``, on gloo for the headers that are received only.

        Raises:
            PeerError: as ``wait``.
        """
        if not self._is_batched:
            me = self._exchange.me
            self._wait(
                lambda index: self._transfers[index].is_header and self._edges[index][1] == me
            )
        else:
            self.wait()

    def wait(self) -> None:
        """Wait until all messages of the round are sent and received.

        On NCCL this makes the current stream wait and returns at once; on gloo the host waits. A
        second call on the same stream does nothing.

        Raises:
            PeerError: a neighbor died, or did not respond within the process group's timeout.
        """
        self._wait(lambda index: True)

    def keep(self) -> None:
        """Keep the tensors for good: messages that nobody waits for may still arrive in them."""
        self._exchange.failed.append(self)

    def _wait(self, is_due: Callable[[int], bool]) -> None:
        begin = time.perf_counter()
        for entry in [each for each in self._works if is_due(each[0])]:
            index, work = entry
            try:
                work.wait()
            except RuntimeError as error:
                self.keep()
                edges = self._edges if self._is_batched else self._edges[index : index + 1]
                raise self._exchange.peer_error(self._step, edges, error) from error
            self._works.remove(entry)
        self._exchange.collectives.stats.waiting_seconds += time.perf_counter() - begin


class NeighborExchange:
    """Batched point-to-point sends and receives (``batch_isend_irecv``) in one process group.

    With gloo, a message that another program of the group sends with the same tag, and that is
    longer than the tensor that awaits it, ends the receiving process: gloo aborts it ("terminate
    called"). So a trainer has a group of its own, where no other messages are, and tags of payloads
    differ by length and kind: messages that do not match wait, and their headers tell why.

    Args:
        process_group: the group whose rank numbers peers have; None: the default group.

    Attributes:
        headers: writes and checks the headers of messages.
        failed: rounds that have failed, whose messages may still arrive.
        collectives: of the group, for rounds in which all ranks send to all.
        counts: of the trainer, whose steps errors name; None: they name the step of ``start``.
    """

    counts: StepCounts | None = None

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.num_ranks = dist.get_world_size(process_group)
        self.me = self.global_rank(self.rank)
        self.collectives = Collectives(process_group)
        self._bytes_sent = 0
        self.failed: list[PendingExchange] = []
        self.headers = MessageHeaders(self.rank, self.num_ranks, process_group)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent by this rank; an all-reduce counts as a ring."""
        return self._bytes_sent + int(self.collectives.stats.wire_bytes)

    @property
    def waiting_seconds(self) -> float:
        """Seconds for which the host has waited for messages and collectives."""
        return self.collectives.stats.waiting_seconds

    def start(
        self, sends: Sequence[Transfer], receives: Sequence[Transfer], step: int
    ) -> PendingExchange:
        """Start a round; transfers between two ranks match in the order in which they are listed.

        Args:
            sends: tensors to send; a tensor may be in several sends.
            receives: tensors to receive into, each of the length and dtype that is sent; one of
                another length is never received.
            step: the step number for error messages.

        Raises:
            PeerError: a neighbor is already known to be dead.
        """
        # Receives first: gloo announces a posted receive to its sender on the connection that our
        # own data use. Announced after the data, two ranks that exchange would send in turn.
        operations = [self._operation(dist.irecv, transfer) for transfer in receives]
        operations += [self._operation(dist.isend, transfer) for transfer in sends]
        edges = [(self.global_rank(transfer.peer), self.me) for transfer in receives]
        edges += [(self.me, self.global_rank(transfer.peer)) for transfer in sends]
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise self.peer_error(step, edges, error) from error
        self._bytes_sent += sum(send.tensor.numel() * send.tensor.element_size() for send in sends)
        return PendingExchange(self, step, [*receives, *sends], edges, works)

    def start_all_reduce_(self, tensor: Tensor, step: int) -> Future[Any]:
        """Start to sum a tensor over all ranks in place; see ``Collectives``.

        Args:
            tensor: float32; do not touch it until ``collectives.finish_all_reduce`` has returned.
            step: the step number for error messages.

        Raises:
            PeerError: a rank is already known to be dead.
        """
        self.collectives.step = step if self.counts is None else self.counts.steps
        return self.collectives.start_all_reduce_(tensor)

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a rank of the group, for error messages."""
        group = self.process_group
        return rank if group is None else dist.get_global_rank(group, rank)

    def peer_error(
        self, step: int, edges: Sequence[tuple[int, int]], error: RuntimeError
    ) -> PeerError:
        """Return the error of messages that were not delivered.

        Args:
            step: the step number.
            edges: sender and receiver of each message, global ranks.
            error: torch's error.
        """
        names = ", ".join(f"{sender} -> {receiver}" for sender, receiver in dict.fromkeys(edges))
        return peer_error(
            self.process_group,
            step if self.counts is None else self.counts.steps,
            f"the message on edge {names} was not delivered",
            error,
            suspects=[peer for edge in edges for peer in edge],
            otherwise="took fewer steps: use join()",
        )

    def _operation(self, kind: Callable[..., Any], transfer: Transfer) -> dist.P2POp:
        return dist.P2POp(
            kind,
            transfer.tensor,
            group=self.process_group,
            tag=transfer.tag,
            group_peer=transfer.peer,
        )
