"""Point-to-point messages in one process group: sends and receives that are started together."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from .errors import PeerError
from .profiling import post
from .run import Run
from .stats import CommStats
from .store import timeout_of

_NUM_KINDS, _NUM_LENGTHS = 4, 2**29 - 1  # gloo's tags are 31 bits

# Of each group: messages that nobody waits for, which gloo may still send, or write into.
_kept = weakref.WeakKeyDictionary[Any, list[Any]]()


def keep(group: dist.ProcessGroup | None, *in_flight: Any) -> None:
    """Keep messages, with their tensors and works, as long as their group."""
    if group := group or dist.group.WORLD:
        _kept.setdefault(group, []).extend(in_flight)


class Transfer(NamedTuple):
    """A tensor and the rank in the group, ``peer``, to send it to or receive it from.

    ``kind``, of 0 to 3, tells messages of one length apart.
    """

    peer: int
    tensor: Tensor
    kind: int = 0


def start(
    group: dist.ProcessGroup | None, sends: Sequence[Transfer], receives: Sequence[Transfer]
) -> Sequence[dist.Work]:
    """Start transfers, receives first; NCCL returns one work for all."""
    # Gloo announces a posted receive to its sender on the connection that our own data use.
    # Announced after the data, two ranks that exchange would send in turn.
    operations = []
    for function, transfers in ((dist.irecv, receives), (dist.isend, sends)):
        for peer, tensor, kind in transfers:
            # Of gloo: a message never arrives in a tensor of another kind or length.
            tag = kind + _NUM_KINDS * (tensor.nbytes % _NUM_LENGTHS)
            operations.append(dist.P2POp(function, tensor, group=group, tag=tag, group_peer=peer))
    works: list[dist.Work] = post(dist.batch_isend_irecv, operations) if operations else []
    return works


@dataclass(eq=False)
class Pending:
    """Messages in flight. Do not touch their tensors until ``wait`` has returned."""

    p2p: "PointToPoint"
    transfers: Sequence[Transfer]  # their tensors are kept alive while in flight
    num_received: int  # the first of them; the others are sent
    works: Sequence[Any]  # one for each of them; NCCL returns one for all
    timeout: tuple[timedelta, ...] = ()  # of each wait: one, or none
    _arrived: set[int] = field(default_factory=set, init=False)

    def wait(self, kind: int | None = None) -> None:
        """Wait until all messages are sent and received, or on gloo those of a kind to receive.

        On NCCL this makes the current stream wait and returns at once; on gloo the host waits. A
        second call on the same stream does nothing.
        """
        is_batch = len(self.works) < len(self.transfers)  # whose messages have no works
        for index, work in enumerate(self.works):
            is_due = kind is None or is_batch or (
                index < self.num_received and self.transfers[index].kind == kind
            )  # fmt: skip
            if not is_due or index in self._arrived:
                continue
            try:
                with self.p2p.run.waiting(self.p2p.stats):
                    work.wait(*self.timeout)
            except RuntimeError as error:
                self.keep()
                failed, num_received = self.transfers, self.num_received
                if not is_batch:
                    failed, num_received = failed[index : index + 1], int(index < num_received)
                raise self.p2p.peer_error(failed, num_received, error) from error
            self._arrived.add(index)

    def keep(self) -> None:
        """Keep the tensors: messages that nobody waits for may still arrive in them."""
        keep(self.p2p.run.group, self.transfers, self.works)


class PointToPoint:
    """Sends and receives in the group of a run, whose rank numbers peers have.

    ``stats``, by default those of the run, count bytes and seconds. An error names the edges on
    which ``what`` was not delivered, and why: a rank died or, as ``otherwise`` says, did something
    else.
    """

    def __init__(
        self,
        run: Run,
        stats: CommStats | None = None,
        what: str = "the message",
        otherwise: str = "ended without this call",
    ) -> None:
        self.run, self.stats = run, run.stats if stats is None else stats
        self._what, self._otherwise = what, otherwise

    def start(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        """Start transfers; those between two ranks match in the order in which they are listed.

        A tensor to receive into has the length and the dtype that is sent: one of another length is
        never received.
        """
        transfers = [*receives, *sends]
        try:
            works = start(self.run.group, sends, receives)
        except RuntimeError as error:
            raise self.peer_error(transfers, len(receives), error) from error
        self.stats.count_bytes(sum([send.tensor.nbytes for send in sends]))
        # Gloo's own may be of the time when members connected; with NCCL the host would wait.
        by_gloo = bool(works) and transfers[0].tensor.is_cpu
        timeout = (timeout_of(self.run.group),) if by_gloo else ()
        return Pending(self, transfers, len(receives), works, timeout)

    def peer_error(
        self, transfers: Sequence[Transfer], num_received: int, error: RuntimeError
    ) -> PeerError:
        """Return the error of undelivered messages, of which the first are to be received."""
        me, peers = self.run.rank, [self.run.global_rank(transfer.peer) for transfer in transfers]
        edges = [(peer, me) for peer in peers[:num_received]]
        edges += [(me, peer) for peer in peers[num_received:]]
        names = ", ".join(f"{sender} -> {receiver}" for sender, receiver in dict.fromkeys(edges))
        what = f"{self._what} on edge {names} was not delivered"
        return self.run.error(what, error, suspects=peers, otherwise=self._otherwise)
