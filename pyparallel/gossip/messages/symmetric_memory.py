"""Messages that the GPUs of one node copy out of each other's memory, without kernels of NCCL."""

import socket
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from ...comm.collectives import Collectives
from ...comm.counts import NUM_FIELDS
from ...comm.errors import PeerError
from ...comm.p2p import Pending, Transfer
from ...comm.store import timeout_of
from ...compression.hooks.comm_worker import comm_worker_for
from ...training.arguments import require
from ...training.trainer import raising_on_all_ranks
from .exchange import HEADER, NeighborExchange
from .header import MessageHeaders

_READY, _READ = 0, 1  # channels: a message can be read; it has been
_HEADER_BYTES = NUM_FIELDS * torch.float64.itemsize
_BY_PEER = attrgetter("peer")


class SharedMemory(NamedTuple):
    """This rank's bytes that all ranks of a group read, and torch's handle of everyone's.

    A signal that is awaited for longer than ``timeout_ms`` ends all CUDA calls of the process.
    """

    own: Tensor
    handle: Any
    timeout_ms: int


class SymmetricMemoryExchange(NeighborExchange):
    """Rounds of one buffer through PyTorch's symmetric memory, one at a time, on one node's GPUs.

    Receivers copy a message out of its sender's memory, on streams of their own: copy engines move
    it, and no multiprocessor. Three steps, of which the host waits for none:

    1. ``start`` writes the message and its headers into this rank's memory, in the order of the
       current stream, and puts the signal READY for each receiver.
    2. On its other stream, which first waits for the current one, a receiver waits for READY,
       copies, and puts the signal READ.
    3. ``wait`` has the current stream wait for its own copies, and for READ of each receiver.

    So a message is written again only after all have read it. As a rank waits for a round before it
    starts the next one, both signals of an edge alternate: each is put after the one before was
    awaited, and none is lost. Copies of a round depend on rounds before it alone, so no ranks wait
    for each other in a circle.

    Headers, counts and sums of complete rounds are those of ``exchange``.
    """

    def __init__(self, exchange: NeighborExchange) -> None:
        super().__init__(exchange.run)
        self.headers: MessageHeaders = exchange.headers
        self.collectives: Collectives = exchange.collectives

    @override
    def reserve(self, messages: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        """Share memory for such messages; all ranks call this together.

        A device that is no GPU, ranks of several nodes, and GPUs that cannot read each other's
        memory are a DisagreementError on all ranks.
        """
        self._header_offset = max(sum(map(_aligned, parts)) for parts in messages)
        size = self._header_offset + self.num_ranks * _HEADER_BYTES
        self._memory = self.share(size, device)
        self._worker = comm_worker_for(device)
        self._unread: list[int] = []  # receivers of the last message that are not waited for
        self._theirs: dict[int, Tensor] = {self.rank: self._memory.own}
        return self._memory.own

    def share(self, num_bytes: int, device: torch.device) -> SharedMemory:
        """Allocate memory, have the other ranks map it, and map theirs."""
        with raising_on_all_ranks(self.run.agree) as fields:
            fields.append(("node with transport='symmetric_memory'", socket.gethostname()))
            rule = "parameters must be on a GPU with transport='symmetric_memory'"
            require(device.type == "cuda", rule, device.type, "leave transport out")
        what = "transport='symmetric_memory' failed: "
        with raising_on_all_ranks(self.run.agree, what):
            from torch._C._distributed_c10d import _SymmetricMemory  # not in every build of torch

            # Not from a memory pool, of which several tensors would have the same signals.
            own = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        group: Any = self.run.group or dist.group.WORLD
        with raising_on_all_ranks(self.run.agree, what):
            handle = _SymmetricMemory.rendezvous(own, group.group_name)
        return SharedMemory(own, handle, round(timeout_of(group).total_seconds() * 1000))

    @override
    def start(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        assert not self._unread, "a round must be waited for before the next one"
        transfers = [*receives, *sends]
        works: list[Any] = []
        written: dict[int, Tensor] = {}  # by address
        try:
            for peer, parts in groupby(sends, _BY_PEER):
                for each, place in self._places(self.rank, peer, parts):
                    address = place.data_ptr()
                    if address not in written and address != each.tensor.data_ptr():
                        place.copy_(each.tensor)
                    message = written.setdefault(address, each.tensor)
                    assert message is each.tensor, "all receivers must get the same message"
                self._unread.append(peer)
            _, handle, timeout_ms = self._memory
            for peer in self._unread:
                handle.put_signal(peer, _READY, timeout_ms)
            if transfers:
                works.append(_Copies(self._memory, self._unread, self._start_copies(receives)))
        except RuntimeError as error:
            raise self.peer_error(transfers, len(receives), error) from error
        self.stats.count_bytes(sum(send.tensor.nbytes for send in sends))
        return Pending(self, transfers, len(receives), works)

    @override
    def peer_error(
        self, transfers: Sequence[Transfer], num_received: int, error: RuntimeError
    ) -> PeerError:
        if "launch failure" in str(error):  # so ends a kernel of torch that waits for too long
            error = RuntimeError(f"a signal has timed out: {error}")
        return super().peer_error(transfers, num_received, error)

    def _start_copies(self, receives: Sequence[Transfer]) -> "Future[Tensor] | None":
        if not receives:
            return None
        return self._worker.start(partial(self._copy, receives), receives[0].tensor)

    def _copy(self, receives: Sequence[Transfer]) -> None:
        _, handle, timeout_ms = self._memory
        for peer, parts in groupby(receives, _BY_PEER):
            handle.wait_signal(peer, _READY, timeout_ms)
            for each, place in self._places(peer, self.rank, parts):
                each.tensor.copy_(place)
            handle.put_signal(peer, _READ, timeout_ms)

    def _places(
        self, sender: int, receiver: int, parts: Iterator[Transfer]
    ) -> Iterator[tuple[Transfer, Tensor]]:
        """Return each part of a message, and where it lies in the sender's memory."""
        if sender not in self._theirs:
            own, handle, _ = self._memory
            self._theirs[sender] = handle.get_buffer(sender, own.shape, own.dtype)
        memory, end = self._theirs[sender], 0
        for part in parts:
            begin = end
            if part.kind == HEADER:
                begin = self._header_offset + receiver * _HEADER_BYTES
            else:
                end += _aligned(part.tensor.nbytes)
                assert begin + part.tensor.nbytes <= self._header_offset, "reserve() more bytes"
            place = memory[begin : begin + part.tensor.nbytes]
            yield part, place.view(part.tensor.dtype).view(part.tensor.shape)


def _aligned(num_bytes: int) -> int:
    """Return the number of bytes that a part of a message takes."""
    return -(-num_bytes // 16) * 16


class _Copies:
    """The copies that this rank makes in a round, and those that others make of its message."""

    def __init__(
        self, memory: SharedMemory, unread: list[int], future: "Future[Tensor] | None"
    ) -> None:
        self._memory, self._unread, self._future = memory, unread, future

    def wait(self) -> None:
        """Have the current stream wait until all have been made."""
        if self._future is not None:
            self._future.wait()
        while self._unread:  # waits for each once, also if it is interrupted and repeated
            self._memory.handle.wait_signal(self._unread.pop(0), _READ, self._memory.timeout_ms)
