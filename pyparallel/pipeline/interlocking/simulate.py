"""Simulation of interlocking backpropagation: when each stage runs, and which delays spread."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import numpy as np

from ..._deprecated import renamed_arguments
from ..schedules.action import Action, Kind
from ..schedules.shape import PipelineShape
from ..simulation.action_table import tabulate
from ..simulation.costs import Costs
from ..simulation.render import draw_deadlock
from ..simulation.timeline import Timeline
from ..simulation.virtual_clock import (
    Process,
    SimulatedAction,
    SimulatedMessage,
    VirtualClock,
    Wait,
)
from .schedule import Interlocking

_NOTHING: Mapping[Action, float] = MappingProxyType({})


@renamed_arguments(layout="shape", calls="steps")
def simulate_interlocking(
    schedule: Interlocking,
    shape: PipelineShape,
    costs: Costs = Costs(),  # noqa: B008 - immutable
    *,
    steps: int = 1,
    delays: Mapping[Action, float] = _NOTHING,
) -> Timeline:
    """Simulate ``InterlockingRuntime`` and return the timeline.

    Besides the schedule's actions the timeline has an ``I`` (``Kind.BACKWARD_INPUT``) whenever a
    stage sends gradients to the previous stage that it does not learn from, or not yet. Gradients
    that have arrived together are one ``I``, whose time is proportional to their number. An ``L``
    runs once the stage has all the gradients it learns from, possibly before its place in the
    schedule.

    Args:
        schedule: with its window.
        shape: one stage on each rank, or all on one.
        costs: times by stage; ``head``, ``learn`` and ``backward_input`` beside ``forward`` and
            ``update``.
        steps: number of steps.
        delays: extra time of single actions.

    Raises:
        ValueError: the schedule cannot run on the shape, or the ranks deadlock; then with the grid
            of the actions that have run.
    """
    problem = schedule.validation_error(shape)
    if problem is not None:
        raise ValueError(problem)
    run = _Run(schedule, shape, costs, steps, delays)
    clock = VirtualClock([run.process(rank) for rank in range(shape.num_ranks)])
    clock.run()
    _check_finished(clock, run.current)
    table = tabulate([each.action for each in ran] for ran in clock.completed)
    times = np.array([each[1:] for ran in clock.completed for each in ran]).reshape(-1, 2)
    return Timeline(table, times[:, 0].copy(), times[:, 1].copy())


def _check_finished(clock: VirtualClock, current: Mapping[int, Action]) -> None:
    """Raise with the grid if a rank is deadlocked; ``current``: the action each rank is at."""
    if all(clock.finished):
        return
    done, actions, starts, ends = [], [], [], []
    for rank, ran in enumerate(clock.completed):
        waiting = [] if clock.finished[rank] else [current[rank]]
        done.append(len(ran))
        actions.append([*(each.action for each in ran), *waiting])
        starts += [*(each.start for each in ran), *(np.nan for _ in waiting)]
        ends += [*(each.end for each in ran), *(np.nan for _ in waiting)]
    table = tabulate(actions)
    raise ValueError(draw_deadlock(table, np.array(starts), np.array(ends), np.array(done)))


@dataclass
class _Inbox:
    """What has arrived at a stage: microbatches; gradients are (microbatch, origin)."""

    activations: set[int] = field(default_factory=set)
    gradients: list[tuple[int, int]] = field(default_factory=list)
    acknowledged: int = 0  # forwards that the next stage has done, where it sends no gradients

    def acknowledge(self) -> None:
        """Count one more forward of the next stage."""
        self.acknowledged += 1


class _Run:
    """The state of every stage, and the process of every rank."""

    def __init__(
        self,
        schedule: Interlocking,
        shape: PipelineShape,
        costs: Costs,
        steps: int,
        delays: Mapping[Action, float],
    ) -> None:
        self._schedule = schedule
        self._shape = shape
        self._steps = steps
        self._delays = delays
        self._durations = costs.durations(shape.num_stages)
        self._latencies = costs.latencies(shape.num_stages)
        self._window = schedule.reach(shape)
        self._last = shape.num_stages - 1
        self._inboxes = [_Inbox() for _ in range(shape.num_stages)]
        self._missing: dict[tuple[int, int], set[int]] = {}
        self._finished: set[tuple[int, int]] = set()
        self.current: dict[int, Action] = {}  # by rank

    def process(self, rank: int) -> Process:
        """Yield the actions and waits of a rank."""
        for action in self._schedule.rank_actions(self._shape, rank, self._steps):
            self.current[rank] = action
            yield from self._run(action)
            if action.kind is not Kind.FORWARD:
                yield from self._handle_ready_gradients(rank)

    def _run(self, action: Action) -> Process:
        stage, _, microbatch = action
        match action.kind:
            case Kind.FORWARD:
                yield from self._forward(action)
            case Kind.HEAD:
                yield self._action(action)
                yield from self._handle_gradients(stage, microbatch, {stage})
            case Kind.LEARN:
                yield from self._finish_backward(stage, microbatch)
            case _:
                yield self._action(action)

    def _forward(self, action: Action) -> Process:
        stage, _, microbatch = action
        inbox = self._inboxes[stage]
        if stage > 0:
            yield lambda: microbatch in inbox.activations
            inbox.activations.remove(microbatch)
        self._missing[stage, microbatch] = {stage, *self._window.arriving(stage)}
        if self._gets_no_gradients(stage):
            most = self._schedule.max_ahead * self._shape.num_microbatches
            yield lambda: microbatch - inbox.acknowledged < most
        messages = []
        if stage < self._last:
            arrive = partial(self._inboxes[stage + 1].activations.add, microbatch)
            messages.append(self._message(stage, stage + 1, arrive))
        if self._gets_no_gradients(stage - 1):
            acknowledge = self._inboxes[stage - 1].acknowledge
            messages.append(self._message(stage, stage - 1, acknowledge))
        yield self._action(action, messages)

    def _finish_backward(self, stage: int, microbatch: int) -> Process:
        """Wait until the weight gradients of a microbatch are accumulated."""
        if stage == self._last:
            yield from self._handle_gradients(stage, microbatch, {stage})
        while (stage, microbatch) not in self._finished:
            yield self._has_gradients(stage)
            yield from self._recv_gradients(stage)

    def _handle_ready_gradients(self, rank: int) -> Process:
        """Handle gradients as long as some have arrived."""
        stages = self._shape.stages(rank)
        while (stage := next((s for s in stages if self._inboxes[s].gradients), None)) is not None:
            yield from self._recv_gradients(stage)

    def _has_gradients(self, stage: int) -> Wait:
        return lambda: bool(self._inboxes[stage].gradients)

    def _recv_gradients(self, stage: int) -> Process:
        """Handle all gradients that have arrived, by microbatch."""
        arrived: dict[int, set[int]] = defaultdict(set)
        for microbatch, origin in self._inboxes[stage].gradients:
            arrived[microbatch].add(origin)
        self._inboxes[stage].gradients.clear()
        for microbatch, origins in arrived.items():
            yield from self._handle_gradients(stage, microbatch, origins)

    def _handle_gradients(self, stage: int, microbatch: int, origins: Collection[int]) -> Process:
        """Send output gradients to the previous stage; accumulate once complete."""
        missing = self._missing[stage, microbatch]
        missing.difference_update(origins)
        to_send = {origin for origin in origins if self._is_sent(origin, stage)}
        if missing:
            yield from self._send_input_grads(stage, microbatch, to_send)
            return
        del self._missing[stage, microbatch]
        joint = to_send & self._only_origin(stage)
        yield from self._send_input_grads(stage, microbatch, to_send - joint)
        learn = Action(stage, Kind.LEARN, microbatch)
        yield self._action(learn, self._gradients(stage, microbatch, joint))
        self._finished.add((stage, microbatch))

    def _send_input_grads(
        self, stage: int, microbatch: int, origins: Collection[int]
    ) -> Iterator[SimulatedAction]:
        if origins:
            action = Action(stage, Kind.BACKWARD_INPUT, microbatch)
            messages = self._gradients(stage, microbatch, origins)
            yield self._action(action, messages, times=len(origins))

    def _gradients(
        self, stage: int, microbatch: int, origins: Collection[int]
    ) -> list[SimulatedMessage]:
        """Return the messages to the previous stage, in the order in which they are sent."""
        previous = stage - 1
        return [
            self._message(
                stage,
                previous,
                partial(self._inboxes[previous].gradients.append, (microbatch, origin)),
            )
            for origin in sorted(origins)
        ]

    def _message(self, source: int, to: int, deliver: Callable[[], object]) -> SimulatedMessage:
        sender, receiver = (stage % self._shape.num_ranks for stage in (source, to))
        latency = 0.0 if sender == receiver else float(self._latencies[min(source, to)])
        return SimulatedMessage(receiver, latency, deliver)

    def _action(
        self, action: Action, messages: Sequence[SimulatedMessage] = (), times: int = 1
    ) -> SimulatedAction:
        seconds = times * self._durations[action.kind, action.stage]
        return SimulatedAction(action, float(seconds + self._delays.get(action, 0.0)), messages)

    def _only_origin(self, stage: int) -> frozenset[int]:
        """Return the loss that a stage learns from if it is one alone, with weight 1; or none."""
        origins = self._window.origins(stage)
        weights = [self._window.weight(origin, stage) for origin in origins]
        return origins if weights == [1.0] else frozenset()

    def _is_sent(self, origin: int, stage: int) -> bool:
        return stage > 0 and self._window.wanted(origin, stage - 1)

    def _gets_no_gradients(self, stage: int) -> bool:
        """Return whether a stage has a next one, but gets no gradients from it."""
        return 0 <= stage < self._last and not self._window.arriving(stage)
