"""What stages hand to each other: by message between ranks, or straight over within one."""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist

from ..comm import Channel, Value, Wires, tensors_of
from ..compression import CorruptMessageError
from .action import Action, Kind
from .codec import Codec, Verbatim
from .layout import Layout

_HERE = -1  # the stream of empty parcels that say so
_SENT_AFTER = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_INPUT: -1}


class Mail:
    """The post office of one rank.

    A stream holds what one stage gets in one direction. Every rank tells from the actions of its
    neighbors what they will send, and in which order.

    Args:
        layout: which stage is where.
        wires: process groups; None: there is but one rank.
        upward: how activations travel between ranks.
        downward: how gradients do.
    """

    def __init__(
        self,
        layout: Layout,
        wires: Wires | None,
        upward: Codec | None = None,
        downward: Codec | None = None,
    ) -> None:
        self._layout = layout
        self._codecs = upward or Verbatim(), downward or Verbatim()
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

    def expect(self, actions_of: Callable[[int], Iterable[Action]]) -> None:
        """Tell what the neighbors are about to do: ``actions_of(rank)``."""
        for peer, channel in self._channels.items():
            channel.expect(self._streams_from(actions_of(peer)))

    def send(self, action: Action, value: Value) -> None:
        """Hand over what an action has made, if anyone is to have it."""
        to = self._receiver(action)
        if to is None:
            return
        stream, peer = _stream(to, action.kind), to % self._layout.num_ranks
        if peer == self._rank:
            self._arrived[stream, action.microbatch] = _detached(value)
        else:
            message = self._codecs[stream % 2].encode(value, _words(stream), action.microbatch)
            self._channels[peer].send(stream, action.microbatch, message)

    def take(self, action: Action) -> Value:
        """What an action needs from another stage; waits until it is here.

        Raises:
            PeerError: it will not come, for the rank it is to come from is dead.
            PeerFailedError: for another rank has failed; its own words.
            CorruptMessageError: it is not what its codec makes.
        """
        source = action.stage + (-1 if action.kind is Kind.FORWARD else 1)
        stream, peer = _stream(action.stage, action.kind), source % self._layout.num_ranks
        wanted = stream, action.microbatch
        while wanted not in self._arrived:
            parcel = self._channels[peer].receive()
            self._arrived[parcel.stream, parcel.number] = parcel.value
        value = self._arrived.pop(wanted)
        return value if peer == self._rank else self._decode(value, stream, peer)

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
            channel.expect([_HERE] if alone_or_two else [_HERE, _HERE])
        for channel in channels:  # at once, so that who makes another call finds it out
            channel.send(_HERE, 0, ())
        for channel in channels:
            channel.receive()
        if not alone_or_two:
            self._pass_the_news()
        for channel in channels:
            channel.settle()

    def _pass_the_news(self) -> None:
        """Up to rank 0 and back down, that all ranks are here."""
        channels = self._channels.values()
        above = [channel for channel in channels if channel.peer > self._rank]
        below = [channel for channel in channels if channel.peer < self._rank]
        for senders, receivers in ((above, below), (below, above)):
            for channel in senders:
                channel.receive()
            for channel in receivers:
                channel.send(_HERE, 0, ())

    def fail(self, reason: str) -> None:
        """Tell the neighbors that still listen that this rank cannot go on."""
        for channel in self._channels.values():
            channel.fail(reason)
        for channel in self._channels.values():
            channel.await_farewell()

    def _decode(self, value: Value, stream: int, sender: int) -> Value:
        try:
            return self._codecs[stream % 2].decode(value, _words(stream))
        except CorruptMessageError as error:
            raise CorruptMessageError(
                f"{_words(stream)} must be what their compressor makes, got a corrupt message from "
                f"rank {sender} ({error})"
            ) from error

    def _receiver(self, action: Action) -> int | None:
        """The stage that gets what an action makes; None: no stage."""
        if action.kind not in _SENT_AFTER:
            return None
        to = action.stage + _SENT_AFTER[action.kind]
        return to if 0 <= to < self._layout.num_stages else None

    def _streams_from(self, actions: Iterable[Action]) -> Iterator[int]:
        for action in actions:
            to = self._receiver(action)
            if to is not None and to % self._layout.num_ranks == self._rank:
                yield _stream(to, action.kind)


def _stream(stage: int, kind: Kind) -> int:
    """The number of what a stage gets from below (forward) or above."""
    return 2 * stage + (kind is not Kind.FORWARD)


def _words(stream: int) -> str:
    return f"{'gradients' if stream % 2 else 'activations'} for stage {stream // 2}"


def _detached(value: Value) -> Value:
    """Cut from the graph that made it, as a message would be."""
    cut = tuple(t.detach().requires_grad_(t.requires_grad) for t in tensors_of(value))
    return cut[0] if isinstance(value, torch.Tensor) else cut
