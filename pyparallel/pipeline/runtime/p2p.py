"""What stages hand to each other: by message between ranks, or straight over within one."""

from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...comm import Channel, P2PGroups, Value, tensors_of
from ...compression import CorruptMessageError
from ..schedules.action import Action, Kind
from ..schedules.shape import PipelineShape
from .codec import Codec, Verbatim

_BARRIER_STREAM = -1  # the stream of empty parcels that say so


class StreamKind(IntEnum):
    """What comes to a stage, each in an order of its own."""

    ACTIVATIONS = 0  # from the stage before
    GRADIENTS = 1  # from the stage behind
    SHARED = 2  # from the stage before: weights that later stages read too


class Endpoint(NamedTuple):
    """Where something goes: a lane of a stage."""

    stage: int
    lane: StreamKind

    @property
    def stream(self) -> int:
        """Its number among the streams of a channel."""
        return len(StreamKind) * self.stage + self.lane

    def __str__(self) -> str:
        words = {StreamKind.GRADIENTS: "gradients", StreamKind.SHARED: "weights"}
        return f"{words.get(self.lane, 'activations')} for stage {self.stage}"


Sent = Callable[[Action], Iterable[Endpoint]]


def sent_after(action: Action) -> tuple[Endpoint, ...]:
    """Where what an action makes goes, whether or not there is such a stage."""
    if action.kind is Kind.FORWARD:
        return (Endpoint(action.stage + 1, StreamKind.ACTIVATIONS),)
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
        return (Endpoint(action.stage - 1, StreamKind.GRADIENTS),)
    return ()


class StageP2P:
    """The post office of one rank.

    Every rank tells from the actions of its neighbors what they will send, and in which order.

    Args:
        layout: which stage is where.
        wires: process groups; None: there is but one rank.
        upward: how activations travel between ranks.
        downward: how gradients do.
    """

    def __init__(
        self,
        layout: PipelineShape,
        wires: P2PGroups | None,
        upward: Codec | None = None,
        downward: Codec | None = None,
    ) -> None:
        self._layout = layout
        self._codecs = {
            StreamKind.ACTIVATIONS: upward or Verbatim(),
            StreamKind.GRADIENTS: downward or Verbatim(),
            StreamKind.SHARED: Verbatim(),
        }
        self._rank = 0 if wires is None else dist.get_rank(wires.up)
        neighbors = {
            stage % layout.num_ranks
            for mine in layout.stages(self._rank)
            for stage in (mine - 1, mine + 1)
            if 0 <= stage < layout.num_stages
        } - {self._rank}
        self._channels = (
            {} if wires is None else {peer: Channel(peer, wires) for peer in sorted(neighbors)}
        )
        self._arrived: dict[tuple[int, int], Value] = {}

    @property
    def bytes_sent(self) -> int:
        """What this rank has sent."""
        return sum(channel.bytes_sent for channel in self._channels.values())

    def expect(
        self, actions_of: Callable[[int], Iterable[Action]], sent: Sent = sent_after
    ) -> None:
        """Tell what the neighbors are about to do, ``actions_of(rank)``, and send after each."""
        for peer, channel in self._channels.items():
            channel.expect(self._streams_from(actions_of(peer), sent))

    def send(self, action: Action, value: Value) -> None:
        """Hand over what an action has made, if anyone is to have it."""
        for to in sent_after(action):
            self.post(to, action.microbatch, value)

    def post(self, to: Endpoint, number: int, value: Value) -> None:
        """Hand something over, under a number that nothing else on its way there has."""
        if not 0 <= to.stage < self._layout.num_stages:
            return
        peer = to.stage % self._layout.num_ranks
        if peer == self._rank:
            self._arrived[to.stream, number] = _detached(value)
        else:
            message = self._codecs[to.lane].encode(value, str(to), number)
            self._channels[peer].send(to.stream, number, message)

    def take(self, action: Action) -> Value:
        """What an action needs from another stage; waits until it is here.

        Raises:
            PeerError: it will not come, for the rank it is to come from is dead.
            PeerFailedError: for another rank has failed; its own words.
            CorruptMessageError: it is not what its codec makes.
        """
        lane = StreamKind.ACTIVATIONS if action.kind is Kind.FORWARD else StreamKind.GRADIENTS
        return self.fetch(Endpoint(action.stage, lane), action.microbatch)

    def fetch(self, here: Endpoint, number: int) -> Value:
        """What was posted so; raises as ``take``."""
        while (here.stream, number) not in self._arrived:
            self._receive_for(here)
        return self._decoded(here, self._arrived.pop((here.stream, number)))

    def next(self, here: Endpoint) -> tuple[int, Value]:
        """The number and value of what has come first, or comes next; raises as ``take``."""
        while (number := self._first(here)) is None:
            self._receive_for(here)
        return number, self.fetch(here, number)

    def waiting(self, here: Endpoint) -> bool:
        """Whether ``next`` would not have to wait."""
        if self._first(here) is not None:
            return True
        peer = self._sender_to(here)
        return peer != self._rank and self._channels[peer].waiting

    def settle(self) -> None:
        """Wait until all that was sent has arrived, and every rank has come to this call.

        No rank leaves before the last one is done: who waits here listens, and hears of a failure
        anywhere.

        Raises:
            PeerError: a rank died, or makes other calls.
            PeerFailedError: a rank has failed; its own words.
        """
        channels = list(self._channels.values())
        alone_or_two = self._layout.num_ranks <= 2  # then one exchange tells each of all others
        for channel in channels:
            channel.expect(
                [_BARRIER_STREAM] if alone_or_two else [_BARRIER_STREAM, _BARRIER_STREAM]
            )
        for channel in channels:  # at once, so that who makes another call finds it out
            channel.send(_BARRIER_STREAM, 0, ())
        for channel in channels:
            self._recv_barrier(channel)
        if not alone_or_two:
            self._propagate_barrier()
        for channel in channels:
            channel.settle()

    def _propagate_barrier(self) -> None:
        """Up to rank 0 and back down, that all ranks are here."""
        channels = self._channels.values()
        above = [channel for channel in channels if channel.peer > self._rank]
        below = [channel for channel in channels if channel.peer < self._rank]
        for senders, receivers in ((above, below), (below, above)):
            for channel in senders:
                self._recv_barrier(channel)
            for channel in receivers:
                channel.send(_BARRIER_STREAM, 0, ())

    def fail(self, reason: str) -> None:
        """Tell the neighbors that still listen that this rank cannot go on."""
        for channel in self._channels.values():
            channel.fail(reason)
        for channel in self._channels.values():
            channel.flush_abort()

    def _recv_barrier(self, channel: Channel) -> None:
        """The parcel that says so; what comes before it is kept."""
        while (parcel := channel.receive()).stream != _BARRIER_STREAM:
            self._arrived[parcel.stream, parcel.number] = parcel.value

    def _receive_for(self, here: Endpoint) -> None:
        peer = self._sender_to(here)
        assert peer != self._rank, f"the schedule must let {here} be made before they are needed"
        parcel = self._channels[peer].receive()
        self._arrived[parcel.stream, parcel.number] = parcel.value

    def _sender_to(self, here: Endpoint) -> int:
        source = here.stage + (1 if here.lane is StreamKind.GRADIENTS else -1)
        return source % self._layout.num_ranks

    def _first(self, here: Endpoint) -> int | None:
        """The number of what came first there of what is still here."""
        return next((nr for stream, nr in self._arrived if stream == here.stream), None)

    def _decoded(self, here: Endpoint, value: Value) -> Value:
        sender = self._sender_to(here)
        if sender == self._rank:
            return value
        try:
            return self._codecs[here.lane].decode(value, str(here))
        except CorruptMessageError as error:
            raise CorruptMessageError(
                f"{here} must be what their compressor makes, got a corrupt message from rank "
                f"{sender} ({error})"
            ) from error

    def _streams_from(self, actions: Iterable[Action], sent: Sent) -> Iterator[int]:
        for action in actions:
            for to in sent(action):
                inside = 0 <= to.stage < self._layout.num_stages
                if inside and to.stage % self._layout.num_ranks == self._rank:
                    yield to.stream


def _detached(value: Value) -> Value:
    """Cut from the graph that made it, as a message would be."""
    cut = tuple(t.detach().requires_grad_(t.requires_grad) for t in tensors_of(value))
    return cut[0] if isinstance(value, torch.Tensor) else cut
