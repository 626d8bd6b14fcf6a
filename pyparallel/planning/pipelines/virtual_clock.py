"""A discrete-event simulation of ranks that choose their next action by the messages received."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

from ...pipeline.schedules.action import Action

_ARRIVALS, _DECISIONS = range(2)  # at equal times messages arrive before ranks decide


class SimulatedMessage(NamedTuple):
    """A message to a rank; ``deliver`` is called ``latency`` after it is sent."""

    rank: int
    latency: float
    deliver: Callable[[], object]


@dataclass(frozen=True)
class SimulatedAction:
    """An action that occupies a rank for ``seconds``, and the messages that it sends at its end."""

    action: Action
    seconds: float
    messages: Sequence[SimulatedMessage] = ()


Wait = Callable[[], bool]  # returns whether the rank can continue
Process = Iterator[SimulatedAction | Wait]


class CompletedAction(NamedTuple):
    """An action with its start and end time."""

    action: Action
    start: float
    end: float


class VirtualClock:
    """An event queue that runs a process for each rank: an iterator of actions and waits."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self._processes = processes
        self._waits: list[Wait | None] = [None] * len(processes)
        self._events: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._order = count()
        self.completed: list[list[CompletedAction]] = [[] for _ in processes]
        self.finished = [False] * len(processes)

    def run(self) -> None:
        """Run until all ranks have finished, or the others wait forever."""
        for rank in range(len(self._processes)):
            self._at(0.0, _DECISIONS, partial(self._advance, rank))
        while self._events:
            time, _, _, event = heapq.heappop(self._events)
            event(time)

    def _at(self, time: float, phase: int, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, phase, next(self._order), event))

    def _advance(self, rank: int, time: float) -> None:
        for requested in self._processes[rank]:
            if isinstance(requested, SimulatedAction):
                self._begin(rank, requested, time)
                return
            if not requested():
                self._waits[rank] = requested
                return
        self.finished[rank] = True

    def _begin(self, rank: int, action: SimulatedAction, start: float) -> None:
        end = start + action.seconds
        self.completed[rank].append(CompletedAction(action.action, start, end))
        for message in action.messages:
            self._at(end + message.latency, _ARRIVALS, partial(self._arrive, message))
        self._at(end, _DECISIONS, partial(self._advance, rank))

    def _arrive(self, message: SimulatedMessage, time: float) -> None:
        message.deliver()
        self._at(time, _DECISIONS, partial(self._advance_if_ready, message.rank))

    def _advance_if_ready(self, rank: int, time: float) -> None:
        wait = self._waits[rank]
        if wait is not None and wait():
            self._waits[rank] = None
            self._advance(rank, time)
