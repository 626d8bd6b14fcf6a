"""Interlocking on paper: when every stage works, and who is late for whose sake."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import numpy as np

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


def simulate_interlocking(
    schedule: Interlocking,
    layout: PipelineShape,
    costs: Costs = Costs(),  # noqa: B008 - immutable
    *,
    calls: int = 1,
    delays: Mapping[Action, float] = _NOTHING,
) -> Timeline:
    """Run so many calls on paper, as ``InterlockingRuntime`` runs them.

    Besides the schedule's actions the timeline has an ``I`` (``Kind.BACKWARD_INPUT``) whenever a
    stage passes gradients on that it learns nothing from, or not yet. Those that are there together
    are one ``I``, which takes as much longer as there are more of them. An ``L`` is where the stage
    has all that it learns from, which may be before its turn.

    Args:
        schedule: with its window.
        layout: one stage on each rank, or all on one.
        costs: times by stage; ``head``, ``learn`` and ``backward_input`` beside ``forward`` and
            ``update``.
        calls: how many follow each other.
        delays: how much longer single actions take.

    Raises:
        ValueError: the schedule cannot run on the layout, or the ranks would wait for each other
            for ever; then with the grid of what has run.
    """
    problem = schedule.validation_error(layout)
    if problem is not None:
        raise ValueError(problem)
    run = _Run(schedule, layout, costs, calls, delays)
    clock = VirtualClock([run.process(rank) for rank in range(layout.num_ranks)])
    clock.run()
    _check_finished(clock, run.places)
    table = tabulate([each.action for each in ran] for ran in clock.completed)
    times = np.array([each[1:] for ran in clock.completed for each in ran]).reshape(-1, 2)
    return Timeline(table, times[:, 0].copy(), times[:, 1].copy())


def _check_finished(clock: VirtualClock, places: Mapping[int, Action]) -> None:
    """Raise with the grid if a rank waits for ever; ``places``: at which action each rank is."""
    if all(clock.finished):
        return
    done, actions, starts, ends = [], [], [], []
    for rank, ran in enumerate(clock.completed):
        waiting = [] if clock.finished[rank] else [places[rank]]
        done.append(len(ran))
        actions.append([*(each.action for each in ran), *waiting])
        starts += [*(each.start for each in ran), *(np.nan for _ in waiting)]
        ends += [*(each.end for each in ran), *(np.nan for _ in waiting)]
    table = tabulate(actions)
    raise ValueError(draw_deadlock(table, np.array(starts), np.array(ends), np.array(done)))


@dataclass
class _Inbox:
    """What has come to a stage and has not been taken: microbatches, the latter with an origin."""

    activations: set[int] = field(default_factory=set)
    gradients: list[tuple[int, int]] = field(default_factory=list)
    answers: int = 0  # forwards that the next stage has done, where it sends no gradients

    def answer(self) -> None:
        """The next stage has done one more."""
        self.answers += 1


class _Run:
    """What every stage has, and what every rank does with it."""

    def __init__(
        self,
        schedule: Interlocking,
        layout: PipelineShape,
        costs: Costs,
        calls: int,
        delays: Mapping[Action, float],
    ) -> None:
        self._schedule = schedule
        self._layout = layout
        self._calls = calls
        self._delays = delays
        self._durations = costs.durations(layout.num_stages)
        self._latencies = costs.latencies(layout.num_stages)
        self._window = schedule.reach(layout)
        self._last = layout.num_stages - 1
        self._inboxes = [_Inbox() for _ in range(layout.num_stages)]
        self._missing: dict[tuple[int, int], set[int]] = {}
        self._learned: set[tuple[int, int]] = set()
        self.places: dict[int, Action] = {}

    def process(self, rank: int) -> Process:
        """What a rank does."""
        for action in self._schedule.rank_actions(self._layout, rank, self._calls):
            self.places[rank] = action
            yield from self._perform(action)
            if action.kind is not Kind.FORWARD:
                yield from self._look_for_gradients(rank)

    def _perform(self, action: Action) -> Process:
        stage, _, microbatch = action
        match action.kind:
            case Kind.FORWARD:
                yield from self._forward(action)
            case Kind.HEAD:
                yield self._work(action)
                yield from self._take_in(stage, microbatch, {stage})
            case Kind.LEARN:
                yield from self._learn(stage, microbatch)
            case _:
                yield self._work(action)

    def _forward(self, action: Action) -> Process:
        stage, _, microbatch = action
        inbox = self._inboxes[stage]
        if stage > 0:
            yield lambda: microbatch in inbox.activations
            inbox.activations.remove(microbatch)
        self._missing[stage, microbatch] = {stage, *self._window.arriving(stage)}
        if self._is_unbound(stage):
            most = self._schedule.max_ahead * self._layout.num_microbatches
            yield lambda: microbatch - inbox.answers < most
        parcels = []
        if stage < self._last:
            arrive = partial(self._inboxes[stage + 1].activations.add, microbatch)
            parcels.append(self._parcel(stage, stage + 1, arrive))
        if self._is_unbound(stage - 1):
            parcels.append(self._parcel(stage, stage - 1, self._inboxes[stage - 1].answer))
        yield self._work(action, parcels)

    def _learn(self, stage: int, microbatch: int) -> Process:
        """Wait until the stage has learned from a microbatch."""
        if stage == self._last:
            yield from self._take_in(stage, microbatch, {stage})
        while (stage, microbatch) not in self._learned:
            yield self._has_gradients(stage)
            yield from self._hear_gradients(stage)

    def _look_for_gradients(self, rank: int) -> Process:
        """Do what can be done with those that are here."""
        stages = self._layout.stages(rank)
        while (here := next((s for s in stages if self._inboxes[s].gradients), None)) is not None:
            yield from self._hear_gradients(here)

    def _has_gradients(self, stage: int) -> Wait:
        return lambda: bool(self._inboxes[stage].gradients)

    def _hear_gradients(self, stage: int) -> Process:
        """Take in what is here, microbatch by microbatch."""
        here: dict[int, set[int]] = defaultdict(set)
        for microbatch, origin in self._inboxes[stage].gradients:
            here[microbatch].add(origin)
        self._inboxes[stage].gradients.clear()
        for microbatch, origins in here.items():
            yield from self._take_in(stage, microbatch, origins)

    def _take_in(self, stage: int, microbatch: int, origins: Collection[int]) -> Process:
        """Gradients of what a stage handed on: pass them on, and learn once all are here."""
        missing = self._missing[stage, microbatch]
        missing.difference_update(origins)
        travelling = {origin for origin in origins if self._travels(origin, stage)}
        if missing:
            yield from self._pass_on(stage, microbatch, travelling)
            return
        del self._missing[stage, microbatch]
        joint = travelling & self._sole(stage)
        yield from self._pass_on(stage, microbatch, travelling - joint)
        learn = Action(stage, Kind.LEARN, microbatch)
        yield self._work(learn, self._gradients(stage, microbatch, joint))
        self._learned.add((stage, microbatch))

    def _pass_on(
        self, stage: int, microbatch: int, origins: Collection[int]
    ) -> Iterator[SimulatedAction]:
        if origins:
            action = Action(stage, Kind.BACKWARD_INPUT, microbatch)
            parcels = self._gradients(stage, microbatch, origins)
            yield self._work(action, parcels, times=len(origins))

    def _gradients(
        self, stage: int, microbatch: int, origins: Collection[int]
    ) -> list[SimulatedMessage]:
        """For the stage before, in the order in which they are sent."""
        before = stage - 1
        return [
            self._parcel(
                stage, before, partial(self._inboxes[before].gradients.append, (microbatch, origin))
            )
            for origin in sorted(origins)
        ]

    def _parcel(self, source: int, to: int, put: Callable[[], object]) -> SimulatedMessage:
        here, there = (stage % self._layout.num_ranks for stage in (source, to))
        latency = 0.0 if here == there else float(self._latencies[min(source, to)])
        return SimulatedMessage(there, latency, put)

    def _work(
        self, action: Action, parcels: Sequence[SimulatedMessage] = (), times: int = 1
    ) -> SimulatedAction:
        seconds = times * self._durations[action.kind, action.stage]
        return SimulatedAction(action, float(seconds + self._delays.get(action, 0.0)), parcels)

    def _sole(self, stage: int) -> frozenset[int]:
        """The loss that a stage learns from if it is but one, with a weight of 1."""
        origins = self._window.origins(stage)
        weights = [self._window.weight(origin, stage) for origin in origins]
        return origins if weights == [1.0] else frozenset()

    def _travels(self, origin: int, stage: int) -> bool:
        return stage > 0 and self._window.wanted(origin, stage - 1)

    def _is_unbound(self, stage: int) -> bool:
        """Whether a stage that has a next one gets no gradients from it."""
        return 0 <= stage < self._last and not self._window.arriving(stage)
