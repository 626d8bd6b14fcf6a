"""Payloads between two ranks: matched by tag on gloo, in the order of the sends on NCCL."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ...comm.profiling import post

PREFETCH_DEPTH = 2  # messages whose receives are posted ahead, so that transfers overlap compute
INLINE_BYTES = 1 << 18  # payloads up to this are copied behind their headers: one message, not two


class Payloads(Protocol):
    """The payloads between this rank and a peer."""

    def send(self, stream: int, payload: Tensor) -> Any:
        """Send a payload of a stream asynchronously; return its work."""

    def recv(self, stream: int, length: int) -> tuple[Tensor, Any]:
        """Return the buffer of a stream's next payload, of ``length`` bytes, and its receive."""

    def prefetch(self, streams: Sequence[int]) -> None:
        """Post receives of payloads, as they are sent, where possible before their headers."""

    def flush(self) -> None:
        """Wait for the sends: on NCCL the current stream, not the host."""


@dataclass(eq=False)
class GlooPayloads(Payloads):
    """Payloads over gloo, with receives posted before the header is here.

    Most payloads of a stream have the length of its first, and receives of this length match its
    sends in order. Those up to ``inline_bytes``, which follow their headers, are not prefetched.
    """

    _peer: int
    _send_group: dist.ProcessGroup
    _recv_group: dist.ProcessGroup
    _inline_bytes: int

    def __post_init__(self) -> None:
        self._usual_sent: dict[int, int] = {}  # bytes, by stream
        self._usual_received: dict[int, int] = {}
        self._prefetched: dict[int, deque[tuple[Tensor, Any]]] = defaultdict(deque)  # by stream

    @override
    def send(self, stream: int, payload: Tensor) -> Any:
        usual = self._usual_sent.setdefault(stream, payload.nbytes) == payload.nbytes
        return post(self._send_group.send, [payload], self._peer, _tag(stream, usual))

    @override
    def recv(self, stream: int, length: int) -> tuple[Tensor, Any]:
        usual = self._usual_received.setdefault(stream, length) == length
        if usual and self._prefetched[stream]:
            return self._prefetched[stream].popleft()
        return self._post(stream, length, usual)

    @override
    def prefetch(self, streams: Sequence[int]) -> None:
        pending = Counter[int]()
        for stream in streams:
            length = self._usual_received.get(stream)
            if length is None or length <= self._inline_bytes:
                continue
            pending[stream] += 1
            while len(self._prefetched[stream]) < pending[stream]:
                self._prefetched[stream].append(self._post(stream, length, usual=True))

    @override
    def flush(self) -> None:
        pass  # the channel waits for each send's work

    def _post(self, stream: int, length: int, usual: bool) -> tuple[Tensor, Any]:
        payload = torch.empty(length, dtype=torch.uint8, device="cpu")
        return payload, post(self._recv_group.recv, [payload], self._peer, _tag(stream, usual))


@dataclass(eq=False)
class NcclPayloads(Payloads):
    """Payloads over NCCL, which ignores tags and runs a communicator's operations in one order.

    A receive is a kernel that waits on the GPU. It is posted once the header is here, which is sent
    after the payload: so it cannot be in front of work that the peer's data depends on. It does not
    wait for the compute stream, nor the compute stream for a send.
    """

    _peer: int
    _send_group: dist.ProcessGroup
    _recv_group: dist.ProcessGroup
    _device: torch.device

    def __post_init__(self) -> None:
        # Receives begin when the stream that they are posted on is done: not the compute stream.
        on_gpu = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None
        self._sent: deque[tuple[Tensor, Any]] = deque()

    @override
    def send(self, stream: int, payload: Tensor) -> Any:
        while self._sent and self._sent[0][1].is_completed():
            self._sent.popleft()
        work = post(self._send_group.send, [payload], self._peer, 0)
        self._sent.append((payload, work))
        return work

    @override
    def recv(self, stream: int, length: int) -> tuple[Tensor, Any]:
        with torch.cuda.stream(self._stream):
            payload = torch.empty(length, dtype=torch.uint8, device=self._device)
            work = post(self._recv_group.recv, [payload], self._peer, 0)
        if self._stream is not None:
            payload.record_stream(torch.cuda.current_stream(self._device))
        return payload, work

    @override
    def prefetch(self, streams: Sequence[int]) -> None:
        pass  # only the header says that the payload is coming

    @override
    def flush(self) -> None:
        while self._sent:
            self._sent.popleft()[1].wait()


def _tag(stream: int, usual: bool) -> int:
    """Return a tag of gloo: each stream has two, for payloads of its usual length and others."""
    return 2 + 2 * stream + (not usual)
