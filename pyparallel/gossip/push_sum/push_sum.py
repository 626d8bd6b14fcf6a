"""PushSum: averaging with neighbors in rounds, around the steps of an optimizer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Self

from torch import Tensor, nn
from typing_extensions import override

from ...comm import PeerError, Run, without_traceback
from ...compression import BufferLayout, CorruptMessageError
from ...training import FlatBuckets, ModelAverager, SavedProgress, Status, Traits, check_like
from ..messages import NeighborExchange
from ..topology import Neighbors, Topology
from .buffer import RoundBuffer
from .dense_buffer import DenseBuffer
from .layout import Places, layouts_of, relayout

_NUM_CACHED_ROUNDS = 256  # of a topology, whose rounds repeat


class PushSum(ModelAverager):
    """PushSum rounds of a model's flat buffers with neighbors, one exchange for each buffer.

    A round is ``send``, then ``merge`` at any later time. In steps of an optimizer it is sent after
    the update and merged ``overlap`` steps later, just before the update; with ``overlap=0`` it is
    merged immediately. Each buffer is merged once its own messages have been received, while those
    of the next buffers are in flight, and has its own push-sum weight: if a neighbor fails during a
    round, every buffer is either averaged or unchanged. Without failures all these weights are
    equal.

    From an ``overlap`` of 2 on z changes while messages are in flight, so the buffers must send
    copies of it. ``keeps_values``: the optimizer steps on z, as of ``Numerator``. With ``layouts``
    a state is loaded into buffers of another order, without them into equal ones only.
    """

    def __init__(
        self,
        buffers: Sequence[RoundBuffer],
        exchange: NeighborExchange,
        topology: Topology,
        overlap: int = 0,
        layouts: Sequence[BufferLayout] | None = None,
        keeps_values: bool = False,
    ) -> None:
        super().__init__([buffer.values for buffer in buffers], exchange.run)
        self.exchange = exchange
        self.topology = topology
        self.round_index = 0
        of_round = partial(topology.neighbors, exchange.rank)
        self._neighbors = lru_cache(maxsize=_NUM_CACHED_ROUNDS)(of_round)
        self._round_buffers = buffers
        self._overlap, self._keeps_values = overlap, keeps_values
        self._steps_in_flight = self._staleness = 0
        self._numerators: Sequence[RoundBuffer] = ()  # that a step was on, perhaps interrupted
        self._failure: PeerError | CorruptMessageError | None = None
        self.traits = Traits(loads_other_buckets=layouts is not None)
        self._places = None if layouts is None else list(map(_places_of, layouts))

    @classmethod
    def start(
        cls,
        make_buffer: Callable[[Tensor, NeighborExchange, BufferLayout], RoundBuffer],
        module: nn.Module,
        buckets: FlatBuckets,
        run: Run,
        topology: Topology,
        overlap: int,
        *,
        keeps_values: bool = False,
    ) -> Self:
        """Start with push-sum weight 1 on every rank, together with all others."""
        exchange, layouts = NeighborExchange(run), layouts_of(buckets, module)
        pairs = zip(buckets.buffers, layouts, strict=True)
        buffers = [make_buffer(values, exchange, layout) for values, layout in pairs]
        lengths = [
            (f"message lengths of bucket {index}", each.message_lengths)
            for index, each in enumerate(buffers)
            if each.message_lengths
        ]
        if lengths:
            run.agree(lengths, None)
        return cls(buffers, exchange, topology, overlap, layouts, keeps_values)

    @classmethod
    def of_dense(
        cls,
        buffers: Sequence[Tensor],
        exchange: NeighborExchange,
        topology: Topology,
        overlap: int = 0,
    ) -> "PushSum":
        """Create PushSum with uncompressed messages over tensors that hold z."""
        dense = [DenseBuffer(buffer, exchange, snapshot=overlap > 1) for buffer in buffers]
        return cls(dense, exchange, topology, overlap)

    @property
    @override
    def status(self) -> Status:
        """Return the first buffer's weight, which is that of all unless a neighbor has failed.

        It is 1 on regular topologies without messages in flight.
        """
        first = self._round_buffers[0]
        is_open = first.numerator.is_open
        return Status(first.weight, self._staleness, self._in_flight, steps_numerator=is_open)

    @property
    def _in_flight(self) -> bool:
        return any(buffer.in_flight for buffer in self._round_buffers)

    def send(self) -> None:
        """Start a round: send the messages and subtract their mass from the weights.

        Without copies the buffers must not change until ``merge`` has returned. A PeerError of a
        neighbor is raised again by every later round.
        """
        neighbors = self._neighbors_of(self.round_index)
        with self._keeping_failures():
            for buffer in self._round_buffers:
                buffer.send(neighbors, self.round_index)
        self._steps_in_flight = 0

    def _neighbors_of(self, round_index: int) -> Neighbors:
        return self._neighbors(self.topology.equivalent_round(round_index))

    def merge(self) -> None:
        """Wait for the messages of the round in flight, if any, and average with them."""
        if self._in_flight:
            with self._keeping_failures():
                for buffer in self._round_buffers:
                    buffer.merge()
            self._staleness = self._steps_in_flight
            self.round_index += 1
            self.exchange.headers.raise_nonfinite()

    def wait(self) -> None:
        """Wait for the messages of the round in flight, if any, without averaging them."""
        with self._keeping_failures():
            for buffer in self._round_buffers:
                buffer.wait()

    @override
    def restore_debiased(self) -> None:
        for buffer in self._numerators:
            buffer.numerator.pause(buffer.weight)

    @override
    def before_step(self) -> None:
        self._begin_step()
        if self._steps_in_flight >= self._overlap:
            self.merge()

    def _begin_step(self) -> None:
        self._steps_in_flight += 1
        for buffer in self._numerators:
            buffer.numerator.end()  # of a step that was interrupted

    @override
    def before_update(self) -> None:
        """Step on x = w * z, as the paper's rule does, unless w is 1 by construction."""
        if self._in_flight or not self.topology.regular:
            self._numerators = self._round_buffers
            for buffer in self._numerators:
                buffer.to_numerator(keeps_values=self._keeps_values)

    @override
    def after_update(self) -> None:
        self.restore_debiased()
        for buffer in self._numerators:
            buffer.numerator.end()
        self._numerators = ()

    @override
    def after_step(self) -> None:
        if not self._in_flight:
            self.send()
        if self._overlap == 0:
            self.merge()

    @override
    def step_buckets(self, step_bucket: Callable[..., None], num_buckets: int) -> None:
        """Step each bucket in one pass with its part of the round, also after a failure."""
        self._steps_in_flight += 1
        merges = self._in_flight and self._steps_in_flight >= self._overlap
        sends = self.run.counts.synchronizes and (merges or not self._in_flight)
        round_index = self.round_index + merges
        neighbors = self._neighbors_of(round_index)
        failure = None if self._failure is None else without_traceback(self._failure)
        for index, buffer in enumerate(self._round_buffers):
            step = partial(step_bucket, index)
            try:
                buffer.step(step, merges=merges, sends=sends)
            except (PeerError, CorruptMessageError) as error:
                failure = failure or error
                buffer.step(step, merges=False, sends=False)
            if sends and failure is None:
                try:
                    buffer.send(neighbors, round_index)
                except PeerError as error:
                    failure = error
        if failure is not None:
            self._failure = without_traceback(failure)
            raise failure
        self.round_index = round_index
        if merges:
            self._staleness = self._steps_in_flight
        if sends:
            self._steps_in_flight = 0
            if self._overlap == 0:
                self.merge()
        self.exchange.headers.raise_nonfinite()

    @override
    def flush(self) -> None:
        self.merge()

    @override
    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        self.wait()
        merged = [buffer.as_merged() for buffer in self._round_buffers]
        return [values for values, _ in merged], merged[0][1]

    @override
    def state_dict(self) -> dict[str, Any]:
        self.wait()
        buffers = [buffer.state_dict() for buffer in self._round_buffers]
        return {
            "round": self.round_index,
            "steps_in_flight": self._steps_in_flight,
            "buffers": buffers,
            "places": self._places,
        }

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait()
        self.round_index = state["round"]
        states = self._buffer_states(state)
        for buffer, buffer_state in zip(self._round_buffers, states, strict=True):
            buffer.load_state_dict(buffer_state)
        self._steps_in_flight = state["steps_in_flight"]

    @override
    def check_state(self, state: dict[str, Any]) -> SavedProgress:
        for key in ("round", "steps_in_flight"):
            check_like(state[key], 0, f"algorithm.{key}")
        states, path = self._buffer_states(state), "algorithm.buffers"
        if len(states) != len(self._round_buffers):
            raise ValueError(f"{path} must be {len(self._round_buffers)}, got {len(states)}")
        for index, (buffer, saved) in enumerate(zip(self._round_buffers, states, strict=True)):
            buffer.check_state(saved, self.topology.num_ranks, f"{path}.{index}")
        counters = {
            "round": state["round"],
            "number of steps since its round": state["steps_in_flight"],
        }
        return SavedProgress(counters, self._mass_of(state))

    def _mass_of(self, state: dict[str, Any]) -> float:
        masses = []
        for saved in state["buffers"]:
            in_flight = saved["in_flight"]
            received = 0.0 if in_flight is None else float(in_flight["masses"].sum())
            masses.append(float(saved["weight"]) + received)
        return sum(masses) / len(masses)

    @override
    def reset(self) -> None:
        for buffer in self._round_buffers:
            buffer.reset_weight()

    def _buffer_states(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = state["buffers"]
        places = state["places"]
        if self._places is None or places is None or places == self._places:
            return states
        return relayout(states, places, self._places)

    @contextmanager
    def _keeping_failures(self) -> Iterator[None]:
        """Keep an error of a round, which every later round raises again before it begins."""
        if self._failure is not None:
            raise without_traceback(self._failure)
        try:
            yield
        except (PeerError, CorruptMessageError) as error:
            self._failure = without_traceback(error)
            raise


def _places_of(layout: BufferLayout) -> Places:
    return {piece.name: piece.numel for piece in layout.pieces}
