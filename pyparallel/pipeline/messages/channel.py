"""An ordered point-to-point channel between two ranks, with receives posted ahead of need."""

import datetime
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm.errors import PeerError, RemoteError, compare_calls, find_call
from ...comm.p2p import keep
from ...comm.profiling import post
from ...comm.store import timeout_of
from .format import (
    HEADER_BYTES,
    NO_BATCH,
    BatchMeta,
    Header,
    Refusal,
    Value,
    describe,
    has_arrived,
    new_header,
    read_call,
    read_header,
)
from .groups import P2PGroups
from .packing import pack, pack_behind, unpack
from .payloads import INLINE_BYTES, PREFETCH_DEPTH, GlooPayloads, NcclPayloads, Payloads

ABORT_FLUSH_SECONDS = 30.0  # for a peer that computes before it receives again
PEER_ABORT_TIMEOUT = datetime.timedelta(seconds=1)  # for a header that was sent before
_HEADER_TAG, _VIA_HOST_TAG = 0, 1  # GlooPayloads has the others


@dataclass(frozen=True)
class P2PMessage:
    """A received value, or why there is none, with its stream and its number in the stream."""

    stream: int
    number: int
    value: Value | Refusal
    batch: BatchMeta = NO_BATCH
    loss: float = math.nan


class Channel:
    """Both directions between this rank and a peer.

    A header precedes each payload, so that shapes may change, and a failing rank can send its error
    in place of the next message, or one that has no value a refusal. A short payload is sent behind
    its header, if one as long was sent before. A send is waited for only after the peer's headers
    count it as received. With NCCL the headers travel over gloo.
    """

    def __init__(self, peer: int, groups: P2PGroups) -> None:
        self.peer = peer
        self.bytes_sent = self.bytes_received = 0
        self._groups = groups
        recv_run = groups.of_payloads(peer, groups.rank)
        send_group: Any = groups.of_payloads(groups.rank, peer).group
        recv_group: Any = recv_run.group
        self._run = groups.headers or recv_run  # in which headers are received
        self._send_group: Any = groups.headers.group if groups.headers else send_group
        self._recv_group: Any = self._run.group
        self._inline_bytes = INLINE_BYTES if groups.supports_inline else 0
        self._has_tags = groups.supports_tags
        self._payloads: Payloads = (
            GlooPayloads(peer, send_group, recv_group, self._inline_bytes)
            if self._has_tags
            else NcclPayloads(peer, send_group, recv_group, groups.device)
        )
        self._expected: deque[int] = deque()  # streams of the messages not received yet
        self._num_announced = 0  # of them by the last `expect`
        self._headers: deque[tuple[Tensor, Any]] = deque()  # posted: header, work
        self._sent: deque[list[tuple[Tensor, Any]]] = deque()
        # Gloo sends a message when the peer receives it, and never if its work is gone by then.
        weakref.finalize(self, keep, send_group, self._sent).atexit = False
        self._abort: tuple[Tensor, Any] | None = None
        self._broken = False
        self._num_delivered = 0
        self._num_received = 0
        # Bytes for payloads behind the next headers, counted alike at both ends. A receive is
        # posted while fewer than PREFETCH_DEPTH messages before it have not arrived, so its room
        # may depend on those before them: it is as long as the longest payload behind a header.
        self._rooms_sent = deque([0] * PREFETCH_DEPTH, maxlen=PREFETCH_DEPTH)
        self._rooms_received = self._rooms_sent.copy()

    def send(
        self,
        stream: int,
        number: int,
        value: Value | Refusal,
        *,
        via_host: bool = False,
        batch: BatchMeta = NO_BATCH,
        loss: float = math.nan,
        call: bytes = b"",
    ) -> None:
        """Send a value asynchronously; it must not be written to until it is delivered.

        ``via_host``: from the host's memory, so that no kernel of NCCL waits on the GPU.
        """
        refusal = None
        if isinstance(value, Refusal):
            refusal, value = value, ()
        is_single, is_nccl = isinstance(value, Tensor), self._groups.headers is not None
        via_host = not self._has_tags and (via_host or not is_nccl)
        header = Header(
            stream, number, self._num_received, describe(value), is_single, None, via_host, refusal,
            batch, loss, call,
        )  # fmt: skip
        length = header.num_bytes
        if length <= self._rooms_sent[0]:
            message = header.to_tensor(length)
            pack_behind(message, value)
            works = [self._isend(message, _HEADER_TAG)]
        else:
            works = self._send_in_two(header, value)
        short = length if length <= self._inline_bytes else 0
        self._rooms_sent.append(max(self._rooms_sent[-1], short))
        self._sent.append(works)
        self.bytes_sent += length + HEADER_BYTES

    def expect(self, streams: Iterable[int]) -> None:
        """Announce the streams of the next messages, in the order in which the peer sends them."""
        num_before = len(self._expected)
        self._expected.extend(streams)
        self._num_announced = len(self._expected) - num_before
        with suppress(RuntimeError):  # it is raised when the message is needed
            self._post_receives()

    def forget(self) -> None:
        """Expect no more of what ``expect`` has announced last; posted receives are of the next."""
        for _ in range(min(self._num_announced, len(self._expected))):
            self._expected.pop()
        self._num_announced = 0

    def recv(self) -> P2PMessage:
        """Wait for the next message and return it; a RemoteError if the peer failed."""
        if not self._expected:
            raise PeerError(
                f"rank {self.peer} has sent all messages that were expected, and not the one that "
                "is needed: do all ranks make the same calls, with the same schedule?"
            )
        # Now, as this rank may wait, and not before it computes. Only the first is needed.
        if self._headers:
            with suppress(RuntimeError):
                self._post_receives()
        else:
            self._attempt(self._post_receives)
        stream, (posted, work) = self._expected.popleft(), self._headers.popleft()
        self._attempt(work.wait)
        header = self._read_header(posted)
        if header.failure is not None:
            self._broken = True
            raise self._remote_error(header.failure)
        if header.stream != stream:
            raise self._wrong_stream(header.stream, stream, read_call(posted))
        length = header.num_bytes
        value: Value | Refusal
        if header.refusal is not None:
            value = header.refusal
        elif not length:
            value = unpack(torch.empty(0, dtype=torch.uint8, device=self._groups.device), header)
        elif length <= posted.nbytes - HEADER_BYTES:
            value = unpack(posted, header, HEADER_BYTES)
        else:
            value = unpack(self._recv_payload(header, length), header)
        short = length if length <= self._inline_bytes else 0
        self._rooms_received.append(max(self._rooms_received[-1], short))
        self.bytes_received += length + HEADER_BYTES
        self._num_received += 1
        self._release_sent(header.received)
        return P2PMessage(stream, header.number, value, header.batch, header.loss)

    @property
    def is_ready(self) -> bool:
        """Return whether the next header has arrived, so that `recv` would hardly wait."""
        # Gloo does not report that a receive has completed before it is waited for.
        return bool(self._expected and self._headers) and has_arrived(self._headers[0][0])

    def abort(self, reason: str) -> None:
        """Send an error in place of the next message; nothing if the peer has died or failed."""
        if not self._broken:
            header = Header(0, 0, self._num_received, failure=reason)
            message = header.to_tensor()
            with suppress(RuntimeError):  # the peer has died or failed: why is known already
                send = self._send_group.send
                self._abort = message, post(send, [message], self.peer, _HEADER_TAG)
                self._post_receives()

    def flush_abort(self) -> None:
        """Wait for the abort, and all sends before it, to be received; not without a limit."""
        if self._abort is None:
            return
        seconds = timeout_of(self._send_group).total_seconds() / 2
        deadline = time.monotonic() + min(ABORT_FLUSH_SECONDS, seconds)
        works = [work for message in [*self._sent, [self._abort]] for _, work in message]
        with suppress(RuntimeError):  # the peer died or receives no more: nothing left to do
            for work in works:
                left = max(0.001, deadline - time.monotonic())
                work.wait(datetime.timedelta(seconds=left))

    def flush(self) -> None:
        """Wait until all sends are delivered; a PeerError if one was not."""
        self._release_sent(self._num_delivered + len(self._sent))
        self._attempt(self._payloads.flush)

    def _read_header(self, posted: Tensor) -> Header:
        """Return a header that has arrived; an invalid one is an error that names the peer."""
        try:
            header = read_header(posted)
        except ValueError as error:
            raise self._bad_header(str(error)) from error
        num_sent = self._num_delivered + len(self._sent)
        if header.failure is None and not 0 <= header.received <= num_sent:
            raise self._bad_header(f"{header.received} messages received, of {num_sent} sent to it")
        return header

    def _bad_header(self, what: str) -> PeerError:
        return PeerError(
            f"rank {dist.get_rank()}: rank {self.peer} must send the headers of this version of "
            f"pyparallel, got one with {what}; do all ranks run the same version?"
        )

    def _send_in_two(self, header: Header, value: Value) -> list[tuple[Tensor, Any]]:
        """Send a header, and its payload in a message of its own; return what to wait for."""
        payload = pack(value)
        message = header.to_tensor()
        if header.via_host:
            sent = self._isend(message, _HEADER_TAG)
            return [sent, self._isend(payload.cpu(), _VIA_HOST_TAG)]
        if not self._has_tags:  # the payload first: see NcclPayloads, which keeps it
            self._attempt(self._payloads.send, header.stream, payload)
            return [self._isend(message, _HEADER_TAG)]
        sent = self._isend(message, _HEADER_TAG)
        return [sent, (payload, self._attempt(self._payloads.send, header.stream, payload))]

    def _recv_payload(self, header: Header, length: int) -> Tensor:
        payload: Tensor
        if header.via_host:
            payload = torch.empty(length, dtype=torch.uint8, device="cpu")
            work = self._attempt(post, self._recv_group.recv, [payload], self.peer, _VIA_HOST_TAG)
            self._attempt(work.wait)
            return payload.to(self._groups.device)
        payload, work = self._attempt(self._payloads.recv, header.stream, length)
        self._attempt(work.wait)
        return payload

    def _post_receives(self) -> None:
        """Post receives of the next headers, and of their payloads where the length is known."""
        # Gloo sends what a receive is posted for: a peer that has failed too sends its own error.
        number = len(self._expected) if self._abort is None else PREFETCH_DEPTH
        while len(self._headers) < min(number, PREFETCH_DEPTH):
            header = new_header(self._rooms_received[len(self._headers)])
            work = post(self._recv_group.recv, [header], self.peer, _HEADER_TAG)
            self._headers.append((header, work))
        self._payloads.prefetch([*islice(self._expected, len(self._headers))])

    def _release_sent(self, num_delivered: int) -> None:
        while self._num_delivered < num_delivered:
            for _, work in self._sent.popleft():
                self._attempt(work.wait)
            self._num_delivered += 1

    def _peer_abort_reason(self) -> str | None:
        """Return the error that the peer sent, perhaps before its connection closed, or None."""
        for posted, work in self._headers:
            with suppress(RuntimeError, ValueError):  # a header that has not arrived, or is none
                work.wait(PEER_ABORT_TIMEOUT)
                reason = read_header(posted).failure
                if reason is not None:
                    return reason
        return None

    def _isend(self, tensor: Tensor, tag: int) -> tuple[Tensor, Any]:
        return tensor, self._attempt(post, self._send_group.send, [tensor], self.peer, tag)

    def _attempt(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call what posts or waits for a message; a RuntimeError is an error of the peer."""
        try:
            return function(*arguments)
        except RuntimeError as error:
            raise self._peer_error(error) from error

    def _wrong_stream(self, sent: int, expected: int, call: str) -> PeerError:
        run = self._run
        calls = {run.global_rank(self.peer): call, run.rank: run.describe_call(find_call())}
        if call not in ("", calls[run.rank]):
            return PeerError(compare_calls(calls))
        return PeerError(
            f"rank {self.peer} sent a message of stream {sent} where {expected} was expected: do "
            "all ranks have the same schedule?"
        )

    def _remote_error(self, reason: str) -> RemoteError:
        return RemoteError(reason or f"rank {self.peer} failed and gave no reason")

    def _peer_error(self, error: RuntimeError) -> PeerError | RemoteError:
        self._broken = True
        if (reason := self._peer_abort_reason()) is not None:
            return self._remote_error(reason)
        suspects = [self._run.global_rank(self.peer)]
        what = "a message was not delivered"
        return self._run.error(what, error, suspects=suspects, closes=False, step=None)
