"""Values sent between stages: as messages between ranks, as detached tensors within a rank."""

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm import PeerError
from ...comm.errors import find_call
from ...compression import CorruptMessageError
from ..schedules.action import Action
from ..schedules.shape import PipelineShape
from .channel import Channel, P2PMessage
from .codec import Codec
from .endpoints import Destinations, Endpoint, StreamKind, destinations_of
from .format import NO_BATCH, BatchMeta, Refusal, Value, cut_failure, describe, detached
from .groups import P2PGroups
from .refusals import StepRefusedError

# CUDA loads a kernel when it runs first, as for new shapes, and may wait for all that run: a send
# would be one, if the peer's host received it only after more work. So once a value has a new
# shape, all travel through the host, for as long as such values may be in flight; at first anyhow.
_UPDATES_VIA_HOST = 2  # for each stage of the pipeline
_BARRIER_STREAM, _SHAPES_STREAM = -1, -2  # of messages without a value

Told = tuple[Refusal | None, float]  # by a barrier: the refusal of any rank, the last one's loss


class StageP2P:
    """Sends and receives of one rank's stages; ``groups`` is None with a single rank.

    Every rank derives from its neighbors' actions what they will send, and in which order.
    """

    batch = NO_BATCH  # that the value received last is of, if it is of a peer's forward

    def __init__(
        self,
        shape: PipelineShape,
        groups: P2PGroups | None,
        activation_codec: Codec | None = None,
        gradient_codec: Codec | None = None,
    ) -> None:
        self._shape = shape
        codecs = {StreamKind.ACTIVATIONS: activation_codec, StreamKind.GRADIENTS: gradient_codec}
        self._codecs = {kind: codec for kind, codec in codecs.items() if codec is not None}
        self._rank = 0 if groups is None else groups.rank
        self._is_last = self._rank == shape.num_ranks - 1  # the one with the losses
        self._call = b""  # of the user
        self._num_updates = 0
        self._sent = set[object]()  # streams and shapes
        self._newest = 0  # updates before the newest of them
        loads_eagerly = os.environ.get("CUDA_MODULE_LOADING") == "EAGER"
        self._is_nccl = groups is not None and groups.headers is not None
        self._sees_shapes = self._is_nccl and not loads_eagerly
        is_ring = 2 < shape.num_ranks < shape.num_stages
        self._announces_shapes = self._sees_shapes and is_ring
        self._has_new_inputs = True  # of this step
        # Seconds for messages of each kind; None: of barriers.
        self.waited: defaultdict[StreamKind | None, float] = defaultdict(float)
        self._run = None if groups is None else groups.payloads[0]
        stages = range(shape.num_stages)
        self._senders = {  # ranks, by what the stages of this rank receive
            Endpoint(stage, kind): sender % shape.num_ranks
            for stage in shape.stages(self._rank)
            for kind in StreamKind
            if (sender := stage + (1 if kind is StreamKind.GRADIENTS else -1)) in stages
        }
        neighbors = sorted({*self._senders.values()} - {self._rank})
        self._channels = (
            {} if groups is None else {peer: Channel(peer, groups) for peer in neighbors}
        )
        self._loss = math.nan  # the newest mean loss of a step that this rank knows
        self._arrived: dict[tuple[int, int], Value | Refusal] = {}  # by stream and number
        self._batches: dict[tuple[int, int], BatchMeta] = {}  # likewise, of peers

    @property
    def bytes_sent(self) -> int:
        """Return the bytes that this rank has sent to other ranks."""
        return sum(channel.bytes_sent for channel in self._channels.values())

    @property
    def bytes_received(self) -> int:
        """Return the bytes that this rank has received from other ranks."""
        return sum(channel.bytes_received for channel in self._channels.values())

    def ranks_of(self, global_ranks: Iterable[int]) -> list[int]:
        """Return ranks as numbered in the pipeline's process group, without others."""
        members = [] if self._run is None else dist.get_process_group_ranks(self._run.group)
        return [members.index(rank) for rank in global_ranks if rank in members]

    def begin_step(self, inputs: Callable[[], Iterable[Sequence[Tensor]]]) -> None:
        """Tell all ranks whether the first stage's inputs of a step have new shapes; all call it.

        If so, all sends before are received now, while no rank loads a kernel for such a shape, and
        those of this step travel through the host: in a ring of three ranks or more, which else may
        come to wait for each other.
        """
        if not self._announces_shapes:
            return
        had_new_inputs, grad = self._has_new_inputs, torch.is_grad_enabled()
        if self._rank == 0:
            keys = {(grad, *((t.shape, t.dtype) for t in each)) for each in inputs()}
            self._has_new_inputs, self._sent = not keys <= self._sent, self._sent | keys
        else:
            channel = self._channels[self._rank - 1]
            channel.expect([_SHAPES_STREAM])
            self._has_new_inputs = self._recv_until(_SHAPES_STREAM, channel).number == 1
        if not self._is_last:
            channel = self._channels[self._rank + 1]
            channel.send(_SHAPES_STREAM, int(self._has_new_inputs), (), call=self._call)
        if self._has_new_inputs and not had_new_inputs:
            self.barrier()
        if self._has_new_inputs or had_new_inputs:
            self._newest = self._num_updates

    def expect(
        self,
        actions_of: Callable[[int], Iterable[Action]],
        destinations: Destinations = destinations_of,
    ) -> None:
        """Announce the next actions of each rank, ``actions_of(rank)``, to post receives ahead."""
        for peer, channel in self._channels.items():
            sent = (each for action in actions_of(peer) for each in destinations(action))
            channel.expect(each.stream for each in sent if each in self._senders)

    def refuse_step(self, action: Action, endpoints: Iterable[Endpoint], refusal: Refusal) -> None:
        """Send a refusal in place of the first message to the next rank; wait until it is there."""
        for each in endpoints:
            if each.stage == action.stage + 1 < self._shape.num_ranks:
                self.send(each, action.microbatch, refusal)
                self._channels[each.stage].flush()  # the program may end now
                return

    def forget(self) -> None:
        """Expect no more messages of the actions that the last ``expect`` has announced."""
        for channel in self._channels.values():
            channel.forget()

    def send(
        self, endpoint: Endpoint, number: int, value: Value | Refusal, batch: BatchMeta = NO_BATCH
    ) -> None:
        """Send a value to a stage, if it exists, with a number unique in flight on its stream."""
        if not 0 <= endpoint.stage < self._shape.num_stages:
            return
        peer = endpoint.stage % self._shape.num_ranks
        if peer == self._rank:
            local = value if isinstance(value, Refusal) else detached(value)
            self._arrived[endpoint.stream, number] = local
            return
        codec = self._codecs.get(endpoint.kind)
        if codec is not None and not isinstance(value, Refusal):
            value = codec.encode(value, endpoint, number)
        channel = self._channels[peer]
        via_host = self._is_nccl and self._goes_via_host(endpoint.stream, value)
        channel.send(
            endpoint.stream, number, value, via_host=via_host, batch=batch, loss=self._loss,
            call=self._call,
        )  # fmt: skip

    def begin_call(self) -> None:
        """Tell the ranks that receive the next messages which call of the user sends them."""
        if self._run is not None:
            self._call = self._run.describe_call(find_call()).encode()

    def count_update(self) -> None:
        """Count an update of a stage of this rank."""
        self._num_updates += 1

    def newest_loss(self, own: float) -> float:
        """Return the newest mean loss of a step that this rank knows.

        On the last rank it is its ``own``; its later gradients take it to the others.
        """
        if self._is_last:
            self._loss = own
        return self._loss

    def recv(self, endpoint: Endpoint, number: int) -> Value | Refusal:
        """Return the value of a number; a StepRefusedError if the previous rank has refused."""
        key, sender = (endpoint.stream, number), self._senders[endpoint]
        while key not in self._arrived:
            assert sender != self._rank, (
                f"the schedule must compute {endpoint} before they are used"
            )
            self._recv_message(self._channels[sender], endpoint.kind)
        self.batch = self._batches.pop(key, NO_BATCH)
        value, codec = self._arrived.pop(key), self._codecs.get(endpoint.kind)
        if codec is None or isinstance(value, Refusal) or sender == self._rank:
            return value
        try:
            return codec.decode(value, endpoint)
        except CorruptMessageError as error:
            raise CorruptMessageError(
                f"{endpoint} must be encoded by their compressor, got a corrupt message from rank "
                f"{sender} ({error})"
            ) from error

    def recv_next(self, endpoint: Endpoint) -> tuple[int, Value | Refusal]:
        """Wait for the next value; return its number and it; raises as ``recv``."""
        while (number := self._first(endpoint)) is None:
            self._recv_message(self._channels[self._senders[endpoint]], endpoint.kind)
        return number, self.recv(endpoint, number)

    def is_ready(self, endpoint: Endpoint) -> bool:
        """Return whether ``recv_next`` would not wait."""
        if self._first(endpoint) is not None:
            return True
        peer = self._senders[endpoint]
        return peer != self._rank and self._channels[peer].is_ready

    def barrier(self, refusal: Refusal | None = None, loss: float = math.nan) -> Told:
        """Wait until all sends are delivered and every rank is here.

        Return the refusal of any rank, and the last one's ``loss``. A waiting rank receives, and so
        learns of a failure on any rank.
        """
        channels = list(self._channels.values())
        one_or_two = self._shape.num_ranks <= 2  # then one exchange reaches all ranks
        for channel in channels:
            channel.expect([_BARRIER_STREAM] if one_or_two else [_BARRIER_STREAM, _BARRIER_STREAM])
        for channel in channels:  # first, so that a rank in another call finds it out
            channel.send(_BARRIER_STREAM, 0, refusal or (), loss=loss, call=self._call)
        told = refusal, loss
        for channel in channels:
            told = self._recv_barrier(channel, *told)
        if not one_or_two:
            told = self._propagate_barrier(*told)
        for channel in channels:
            channel.flush()
        return told

    def _propagate_barrier(self, refusal: Refusal | None, loss: float) -> Told:
        """Send the barrier from the last rank to rank 0 and back, once each rank is here."""
        channels = self._channels.values()
        higher = [channel for channel in channels if channel.peer > self._rank]
        lower = [channel for channel in channels if channel.peer < self._rank]
        for senders, receivers in ((higher, lower), (lower, higher)):
            for channel in senders:
                refusal, loss = self._recv_barrier(channel, refusal, loss)
            for channel in receivers:
                channel.send(_BARRIER_STREAM, 0, refusal or (), loss=loss, call=self._call)
        return refusal, loss

    def agree_on_error(self, text: str, without_store: str) -> str:
        """Return the error that all ranks raise, as ``Reports.agree``."""
        if self._run is None:
            return text
        return self._run.reports().agree(cut_failure(text), cut_failure(without_store))

    def abort(self, reason: str, *, waits: bool = True) -> None:
        """Send an error to the neighbors that are still connected; ``waits``: as of Reports."""
        for channel in self._channels.values():
            channel.abort(reason)
        for channel in self._channels.values():
            channel.flush_abort()
        if self._run is not None:
            self._run.reports().end_agreement(waits=waits)

    def _goes_via_host(self, stream: int, value: Value | Refusal) -> bool:
        if self._sees_shapes and not isinstance(value, Refusal):
            # An evaluation runs no backward, whose kernels would be new in training.
            key = stream, describe(value), torch.is_grad_enabled()
            if key not in self._sent:
                self._sent.add(key)
                self._newest = self._num_updates
        is_new = self._num_updates < self._newest + _UPDATES_VIA_HOST * self._shape.num_stages
        return is_new or (self._announces_shapes and self._has_new_inputs)

    def _recv_barrier(self, channel: Channel, refusal: Refusal | None, loss: float) -> Told:
        """Receive until the barrier's message; return what it tells."""
        message = self._recv_until(_BARRIER_STREAM, channel)
        refusal = message.value if isinstance(message.value, Refusal) else refusal
        return refusal, message.loss if channel.peer > self._rank else loss

    def _recv_until(self, stream: int, channel: Channel) -> P2PMessage:
        """Receive until a message without a value; keep the values before."""
        while (message := self._recv_message(channel, None)).stream != stream:
            pass
        return message

    def _recv_message(self, channel: Channel, kind: StreamKind | None) -> P2PMessage:
        """Receive a rank's next message, of whichever stream, while one of ``kind`` is needed.

        Its value is kept until it is asked for.
        """
        begin = time.perf_counter()
        assert self._run is not None
        with self._run.waiting():
            message = channel.recv()
        self.waited[kind] += time.perf_counter() - begin
        key, value = (message.stream, message.number), message.value
        if message.stream < 0:
            return message
        if key in self._arrived:
            raise PeerError(
                f"rank {channel.peer} must send each message once, got a second one of stream "
                f"{message.stream} with number {message.number}"
            )
        is_gradient = message.stream % len(StreamKind) == StreamKind.GRADIENTS
        if isinstance(value, Refusal) and not is_gradient:
            raise StepRefusedError(value, channel.peer)
        self._arrived[key] = value
        if is_gradient and not self._is_last:
            self._loss = message.loss
        if message.batch != NO_BATCH:
            self._batches[key] = message.batch
        return message

    def _first(self, endpoint: Endpoint) -> int | None:
        return next((nr for stream, nr in self._arrived if stream == endpoint.stream), None)
