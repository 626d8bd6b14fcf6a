"""Rounds of point-to-point messages in one process group."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .errors import PeerError, peer_error


@dataclass(frozen=True)
class Transfer:
    """A tensor and the rank in the group to send it to or receive it from."""

    peer: int
    tensor: Tensor


class PendingExchange:
    """Messages in flight. Do not touch their tensors until ``wait`` has returned."""

    def __init__(
        self,
        rank: int,
        step: int,
        edges: Sequence[tuple[int, int]],
        works: Sequence[dist.Work],
        tensors: Sequence[Tensor],
    ) -> None:
        self._rank = rank
        self._step = step
        self._edges = edges
        self._works = works
        self._tensors = tensors  # kept alive while in flight

    def wait(self) -> None:
        """Wait until all messages of the round are sent and received.

        On NCCL this makes the current stream wait and returns at once; on gloo the host waits. A
        second call on the same stream does nothing.

        Raises:
            PeerError: a neighbor died, or did not respond within the process group's timeout.
        """
        for index, work in enumerate(self._works):
            # NCCL returns one work for the whole batch.
            edges = self._edges[index : index + 1] if len(self._works) > 1 else self._edges
            try:
                work.wait()
            except RuntimeError as error:
                raise _peer_error(self._rank, self._step, edges, error) from error
        self._works = ()


class NeighborExchange:
    """Batched point-to-point sends and receives (``batch_isend_irecv``) in one process group.

    Args:
        process_group: the group whose rank numbers peers have; None: the default group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.num_ranks = dist.get_world_size(process_group)
        self.bytes_sent = 0

    def start(
        self, sends: Sequence[Transfer], receives: Sequence[Transfer], step: int
    ) -> PendingExchange:
        """Start a round; transfers between two ranks match in the order in which they are listed.

        Args:
            sends: tensors to send; a tensor may be in several sends.
            receives: tensors to receive into, each of the length and dtype that is sent. With
                another length, gloo ends the receiving process (trainers check lengths first).
            step: the step number for error messages.

        Raises:
            PeerError: a neighbor is already known to be dead.
        """
        # Receives first: gloo announces a posted receive to its sender on the connection that our
        # own data use. Announced after the data, two ranks that exchange would send in turn.
        operations = [self._operation(dist.irecv, transfer) for transfer in receives]
        operations += [self._operation(dist.isend, transfer) for transfer in sends]
        me = self.global_rank(self.rank)
        edges = [(self.global_rank(transfer.peer), me) for transfer in receives]
        edges += [(me, self.global_rank(transfer.peer)) for transfer in sends]
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise _peer_error(me, step, edges, error) from error
        self.bytes_sent += sum(send.tensor.numel() * send.tensor.element_size() for send in sends)
        return PendingExchange(me, step, edges, works, [transfer.tensor for transfer in operations])

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a rank of the group, for error messages."""
        group = self.process_group
        return rank if group is None else dist.get_global_rank(group, rank)

    def _operation(self, kind: Callable[..., Any], transfer: Transfer) -> dist.P2POp:
        return dist.P2POp(kind, transfer.tensor, group=self.process_group, group_peer=transfer.peer)


def _peer_error(
    rank: int, step: int, edges: Sequence[tuple[int, int]], error: RuntimeError
) -> PeerError:
    peers = sorted({peer for edge in edges for peer in edge} - {rank})
    names = ", ".join(f"{sender} -> {receiver}" for sender, receiver in dict.fromkeys(edges))
    blamed = " or ".join(f"rank {peer}" for peer in peers)
    what = f"the message on edge {names} was not delivered"
    return peer_error(rank, step, what, error, blamed, "took fewer steps: use join()")
