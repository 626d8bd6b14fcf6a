"""Rounds of point-to-point messages on one process group."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


class PeerError(RuntimeError):
    """A message could not be delivered; the sentence names rank, edge and step."""


@dataclass(frozen=True)
class Transfer:
    """A tensor, and the rank in the group that it goes to or comes from."""

    peer: int
    tensor: Tensor


class Round:
    """Messages under way. Their tensors must stay untouched until ``wait`` has returned."""

    def __init__(
        self, edges: Sequence[str], works: Sequence[dist.Work], tensors: Sequence[Tensor], step: int
    ) -> None:
        self._edges = edges
        self._works = works
        self._tensors = tensors
        self._step = step

    def wait(self) -> None:
        """Wait until all messages of the round have left and arrived.

        On NCCL this makes the current stream wait and returns at once; on gloo the caller waits.

        Raises:
            PeerError: a neighbor died, or stayed silent for the process group's timeout.
        """
        batched = len(self._works) < len(self._edges)  # NCCL answers with one work for the batch
        edges = [", ".join(self._edges)] if batched else self._edges
        for edge, work in zip(edges, self._works, strict=True):
            try:
                work.wait()
            except RuntimeError as error:
                raise _peer_error(edge, self._step, error) from error


class Exchange:
    """Sends and receives whole rounds at once, as ``batch_isend_irecv`` of one process group.

    Args:
        process_group: the ranks that can be reached, numbered as in the group; None: the default.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.num_ranks = dist.get_world_size(process_group)
        self.bytes_sent = 0

    def start(self, sends: Sequence[Transfer], receives: Sequence[Transfer], step: int) -> Round:
        """Let a round begin; two ranks' transfers match in the order in which they are listed.

        Args:
            sends: what leaves; a tensor may stand in several sends.
            receives: where messages arrive, each tensor of the length and dtype that is sent.
            step: the number that an error message names.

        Raises:
            PeerError: a neighbor is already known to be dead.
        """
        operations = [self._operation(dist.isend, transfer) for transfer in sends]
        operations += [self._operation(dist.irecv, transfer) for transfer in receives]
        edges = [f"{self.rank} -> {transfer.peer}" for transfer in sends]
        edges += [f"{transfer.peer} -> {self.rank}" for transfer in receives]
        if not operations:
            return Round([], [], [], step)
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise _peer_error(", ".join(edges), step, error) from error
        self.bytes_sent += sum(send.tensor.numel() * send.tensor.element_size() for send in sends)
        return Round(edges, works, [op.tensor for op in operations], step)

    def _operation(self, kind: object, transfer: Transfer) -> dist.P2POp:
        return dist.P2POp(
            kind, transfer.tensor, group=self.process_group, group_peer=transfer.peer
        )


def _peer_error(edge: str, step: int, error: RuntimeError) -> PeerError:
    reason = str(error).splitlines()[0]
    return PeerError(
        f"step {step}: the message on edge {edge} was not delivered; the other end died or was "
        f"silent for the process group's timeout ({reason})"
    )
