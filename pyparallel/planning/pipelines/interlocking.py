"""Simulation of interlocking backpropagation: when each stage runs, and which delays spread."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from types import MappingProxyType

import numpy as np

from ...pipeline.interlocking.inbox import GradientInbox, GradientTask
from ...pipeline.interlocking.schedule import Interlocking
from ...pipeline.schedules.action import Action, Kind
from ...pipeline.schedules.shape import PipelineShape
from .action_table import tabulate
from .costs import Costs
from .render import draw_deadlock
from .timeline import Timeline
from .virtual_clock import Process, SimulatedAction, SimulatedMessage, VirtualClock

_NOTHING: Mapping[Action, float] = MappingProxyType({})


def simulate_interlocking(
    schedule: Interlocking,
    shape: PipelineShape,
    costs: Costs = Costs(),  # noqa: B008 - immutable
    *,
    steps: int = 1,
    delays: Mapping[Action, float] = _NOTHING,
) -> Timeline:
    """Simulate steps of interlocking backpropagation and return the timeline.

    Besides the schedule's actions the timeline has an ``I`` (``Kind.BACKWARD_INPUT``) whenever a
    stage sends gradients to the previous stage that it does not learn from, or not yet; its time is
    proportional to the number that have arrived together. An ``L`` runs once the stage has all the
    gradients it learns from, possibly before its place in the schedule.
    """
    problem = schedule.error_at(shape)
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


@dataclass(eq=False)
class _Run:
    schedule: Interlocking
    shape: PipelineShape
    costs: InitVar[Costs]
    steps: int
    delays: Mapping[Action, float]

    def __post_init__(self, costs: Costs) -> None:
        schedule, shape = self.schedule, self.shape
        self._durations = costs.durations(shape.num_stages)
        self._latencies = costs.latencies(shape.num_stages)[0]
        self._window = schedule.reach(shape)
        self._last = shape.num_stages - 1
        max_ahead = schedule.max_ahead * shape.num_microbatches
        stages = range(shape.num_stages)
        self._inboxes = [GradientInbox(stage, self._window, max_ahead) for stage in stages]
        self._activations: list[set[int]] = [set() for _ in stages]  # microbatches that arrived
        self.current: dict[int, Action] = {}  # by rank

    def process(self, rank: int) -> Process:
        """Yield the actions and waits of a rank."""
        for action in self.schedule.rank_actions(self.shape, rank, self.steps):
            self.current[rank] = action
            yield from self._run(action)
            if action.kind is not Kind.FORWARD:
                yield from self._handle_ready_gradients(rank)

    def _run(self, action: Action) -> Process:
        stage, _, microbatch = action
        inbox = self._inboxes[stage]
        if action.kind is Kind.FORWARD:
            yield from self._forward(action)
        elif action.kind is Kind.LEARN:
            if stage == self._last:
                yield from self._handle(stage, inbox.take_own(microbatch))
            while inbox.is_incomplete(microbatch):
                yield lambda: inbox.has_arrived
                yield from self._handle_arrived(stage)
        else:
            yield self._action(action)
            if action.kind is Kind.HEAD:
                yield from self._handle(stage, inbox.take_own(microbatch))

    def _forward(self, action: Action) -> Process:
        stage, _, microbatch = action
        inbox, activations = self._inboxes[stage], self._activations[stage]
        if stage > 0:
            yield lambda: microbatch in activations
            activations.remove(microbatch)
        yield lambda: not inbox.must_wait
        inbox.begin(microbatch)
        messages = []
        if stage < self._last:
            arrive = partial(self._activations[stage + 1].add, microbatch)
            messages.append(self._message(stage, stage + 1, arrive))
        if self._window.acknowledges(stage):
            acknowledge = self._inboxes[stage - 1].acknowledge
            messages.append(self._message(stage, stage - 1, acknowledge))
        yield self._action(action, messages)

    def _handle_ready_gradients(self, rank: int) -> Process:
        stages = self.shape.stages(rank)
        while (
            stage := next((s for s in stages if self._inboxes[s].has_arrived), None)
        ) is not None:
            yield from self._handle_arrived(stage)

    def _handle_arrived(self, stage: int) -> Process:
        for task in self._inboxes[stage].take():
            yield from self._handle(stage, task)

    def _handle(self, stage: int, task: GradientTask) -> Iterator[SimulatedAction]:
        microbatch = task.microbatch
        if task.sent:
            action = Action(stage, Kind.BACKWARD_INPUT, microbatch)
            messages = self._gradients(stage, microbatch, task.sent)
            yield self._action(action, messages, times=len(task.sent))
        if task.is_complete:
            joint = () if task.joint is None else (task.joint,)
            learn = Action(stage, Kind.LEARN, microbatch)
            yield self._action(learn, self._gradients(stage, microbatch, joint))

    def _gradients(
        self, stage: int, microbatch: int, origins: Iterable[int]
    ) -> list[SimulatedMessage]:
        put = self._inboxes[stage - 1].put
        return [self._message(stage, stage - 1, partial(put, microbatch, each)) for each in origins]

    def _message(self, source: int, to: int, deliver: Callable[[], object]) -> SimulatedMessage:
        sender, receiver = (stage % self.shape.num_ranks for stage in (source, to))
        latency = 0.0 if sender == receiver else float(self._latencies[min(source, to)])
        return SimulatedMessage(receiver, latency, deliver)

    def _action(
        self, action: Action, messages: Sequence[SimulatedMessage] = (), times: int = 1
    ) -> SimulatedAction:
        seconds = times * self._durations[action.kind, action.stage]
        return SimulatedAction(action, float(seconds + self.delays.get(action, 0.0)), messages)
