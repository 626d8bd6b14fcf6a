"""Parcels between two ranks, in the order in which each sends them, received ahead of need."""

import datetime
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .gossip_rounds import PeerError
from .wire_format import (
    HEADER_WORDS,
    Header,
    Value,
    describe,
    has_arrived,
    new_header,
    pack,
    read_header,
    unpack,
)

PREFETCH_DEPTH = (
    2  # parcels for which receives are posted before they are needed, so that they may travel
)
ABORT_FLUSH_SECONDS = 30.0  # for a peer that computes before it listens again
PEER_ABORT_TIMEOUT = datetime.timedelta(seconds=1)  # for a label to arrive that was sent before
_LABELS = 0  # the tag of labels; a stream has two more, for parcels of its usual length and others


class PeerFailedError(RuntimeError):
    """The other rank said that it cannot go on; the sentence is its own."""


@dataclass(frozen=True)
class P2PMessage:
    """What arrived, on which stream, under which number."""

    stream: int
    number: int
    value: Value


@dataclass(frozen=True)
class P2PGroups:
    """The process groups that carry what goes between ranks.

    Args:
        labels: of gloo, for labels are read by the host. None: up and down are of gloo and carry
            them too, in the direction that they go: a group's thread that reads and writes at once
            is slow at both.
        up: parcels from a rank to a higher one.
        down: parcels to a lower one. NCCL runs a group's messages between two ranks in one order,
            so the two directions must not share one.
        device: where parcels lie.
    """

    labels: dist.ProcessGroup | None
    up: dist.ProcessGroup
    down: dist.ProcessGroup
    device: torch.device

    @property
    def tagged(self) -> bool:
        """Whether messages are told apart by tags; NCCL knows none."""
        return self.device.type == "cpu"


class Channel:
    """Both directions between this rank and another.

    A label travels before each parcel, so that a value may change its shapes and a rank that fails
    can say so in place of what is expected. Parcels of one stream mostly have the length of the
    first: their receives are posted before the label is here. A send is never waited for before
    the other rank's labels count it as received.

    Args:
        peer: the other rank, as the groups number it.
        wires: the groups.
    """

    def __init__(self, peer: int, wires: P2PGroups) -> None:
        self.peer = peer
        self.bytes_sent = 0
        self._wires = wires
        self._rank = dist.get_rank(wires.up)
        self._outward, self._inward = (
            (wires.up, wires.down) if peer > self._rank else (wires.down, wires.up)
        )
        self._labels_outward = wires.labels or self._outward
        self._labels_inward = wires.labels or self._inward
        self._expected: deque[int] = deque()
        self._labels: deque[tuple[int, Tensor, Any]] = deque()  # posted: stream, label, work
        self._prefetched: dict[int, deque[tuple[Tensor, Any]]] = defaultdict(deque)  # by stream
        self._sent: deque[list[tuple[Tensor, Any]]] = deque()
        self._abort: tuple[Tensor, Any] | None = None
        self._broken = False
        self._num_delivered = 0
        self._num_received = 0
        self._usual_sent: dict[int, int] = {}
        self._usual_received: dict[int, int] = {}

    def send(self, stream: int, number: int, value: Value) -> None:
        """Let a value leave; it must stay untouched until it has arrived.

        Raises:
            ValueError: a value that cannot travel.
            PeerError: the other rank is known to be dead.
        """
        payload = pack(value)
        items, single = describe(value), isinstance(value, Tensor)
        label = Header(stream, number, self._num_received, items, single)
        usual = self._usual_sent.setdefault(stream, payload.numel()) == payload.numel()
        if not usual and not self._wires.tagged:
            raise ValueError(
                f"values must keep their shapes where messages have no tags (NCCL), got "
                f"{payload.numel()} bytes after {self._usual_sent[stream]}"
            )
        works = [self._isend(label.to_tensor(), self._labels_outward, _LABELS)]
        if payload.numel():
            works.append(self._isend(payload, self._outward, _tag(stream, usual)))
        self._sent.append(works)
        self.bytes_sent += payload.numel() + 8 * HEADER_WORDS

    def expect(self, streams: Iterable[int]) -> None:
        """Tell which streams the next parcels are of, in the order in which they are sent."""
        self._expected.extend(streams)
        self._post_ahead()

    def receive(self) -> P2PMessage:
        """The next parcel; waits for it.

        Raises:
            PeerError: the other rank died, or was silent for the process group's timeout.
            PeerFailedError: the other rank said that it cannot go on.
        """
        if not self._labels:
            with self._peer_errors():
                self._post()
        stream, posted, work = self._labels.popleft()
        self._wait(work)
        label = read_header(posted)
        if label.failure is not None:
            self._broken = True
            raise PeerFailedError(label.failure)
        if label.stream != stream:
            raise PeerError(
                f"rank {self.peer} sent a parcel of stream {label.stream} where {stream} was "
                "expected: do all ranks make the same calls, with the same schedule?"
            )
        payload = self._payload(label)
        self._num_received += 1
        self._release(label.received)
        self._post_ahead()
        return P2PMessage(stream, label.number, unpack(payload, label))

    @property
    def waiting(self) -> bool:
        """Whether the next parcel's label is here, so that `receive` would hardly wait."""
        # Gloo does not say whether a receive is done, unless it is waited for.
        return bool(self._labels) and has_arrived(self._labels[0][1])

    def fail(self, reason: str) -> None:
        """Tell the other rank, in place of the next parcel, that there will be none.

        Nothing is said to a rank that is dead or has itself said so.
        """
        if not self._broken:
            label = Header(0, 0, self._num_received, failure=reason)
            with suppress(PeerError):
                self._abort = self._isend(label.to_tensor(), self._labels_outward, _LABELS)

    def flush_abort(self) -> None:
        """Give the other rank time to hear of the failure, and of all before it."""
        if self._abort is None:
            return
        deadline = time.monotonic() + ABORT_FLUSH_SECONDS
        works = [work for parcel in [*self._sent, [self._abort]] for _, work in parcel]
        with suppress(RuntimeError):  # it died, or does not listen: nothing is left to be done
            for work in works:
                left = max(0.001, deadline - time.monotonic())
                work.wait(datetime.timedelta(seconds=left))

    def settle(self) -> None:
        """Wait until all that was sent has arrived.

        Raises:
            PeerError: it did not.
        """
        self._release(self._num_delivered + len(self._sent))

    def _payload(self, label: Header) -> Tensor:
        """The bytes of the parcel, received as foreseen, or now that its length is known.

        Receives of a stream's usual length match its sends in order; one that was posted for a
        parcel that turns out to be of another length serves the next that is not.
        """
        stream, length = label.stream, label.num_bytes
        usual = self._usual_received.setdefault(stream, length) == length
        if not length:
            return self._buffer(0)
        if not usual or not self._prefetched[stream]:
            payload = self._buffer(length)
            with self._peer_errors():
                self._irecv(payload, self._inward, _tag(stream, usual)).wait()
            return payload
        payload, work = self._prefetched[stream].popleft()
        self._wait(work)
        return payload

    def _post_ahead(self) -> None:
        """As `_post`; a peer that has left takes nothing away from what has arrived.

        What cannot be posted is missed when it is needed, and told then.
        """
        with suppress(RuntimeError):
            self._post()

    def _post(self) -> None:
        """Post the labels of the next parcels, and these where their length can be foreseen."""
        while self._expected and len(self._labels) < PREFETCH_DEPTH:
            label = new_header()
            work = self._irecv(label, self._labels_inward, _LABELS)
            self._labels.append((self._expected.popleft(), label, work))
        awaited = Counter[int]()
        for stream, _, _ in self._labels:
            awaited[stream] += 1
            length = self._usual_received.get(stream)
            if length is None and not self._wires.tagged:
                return  # without tags receives match sends in order: this one must come first
            while length and len(self._prefetched[stream]) < awaited[stream]:
                payload = self._buffer(length)
                work = self._irecv(payload, self._inward, _tag(stream, usual=True))
                self._prefetched[stream].append((payload, work))

    def _buffer(self, length: int) -> Tensor:
        return torch.empty(length, dtype=torch.uint8, device=self._wires.device)

    def _release(self, num_delivered: int) -> None:
        """Let go of what has arrived."""
        while self._num_delivered < num_delivered:
            for _, work in self._sent.popleft():
                self._wait(work)
            self._num_delivered += 1

    def _peer_abort_reason(self) -> str | None:
        """Why the other rank has left, if it has said so: its parcels may be lost, not its label.

        A failure's label may have come before the connection went, as its receive is posted ahead.
        """
        for _, posted, work in self._labels:
            with suppress(RuntimeError):
                work.wait(PEER_ABORT_TIMEOUT)
                reason = read_header(posted).failure
                if reason is not None:
                    return reason
        return None

    def _isend(self, tensor: Tensor, group: dist.ProcessGroup, tag: int) -> tuple[Tensor, Any]:
        with self._peer_errors():
            return tensor, dist.isend(tensor, group=group, group_dst=self.peer, tag=tag)

    def _irecv(self, tensor: Tensor, group: dist.ProcessGroup, tag: int) -> Any:
        return dist.irecv(tensor, group=group, group_src=self.peer, tag=tag)

    def _wait(self, work: Any) -> None:
        with self._peer_errors():
            work.wait()

    @contextmanager
    def _peer_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._peer_error(error) from error

    def _peer_error(self, error: RuntimeError) -> PeerError | PeerFailedError:
        self._broken = True
        if (reason := self._peer_abort_reason()) is not None:
            return PeerFailedError(reason)
        return PeerError(
            f"rank {self.peer} died or was silent for the process group's timeout "
            f"({str(error).splitlines()[0]})"
        )


def _tag(stream: int, usual: bool) -> int:
    return 1 + 2 * stream + (not usual)
