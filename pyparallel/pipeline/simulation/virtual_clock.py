"""Ranks at action on one clock, on paper: each decides what is next by what it has got by then."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from ..schedules.action import Action

_ARRIVALS, _DECISIONS = range(2)  # of one moment: whoever decides has what arrives just then


class SimulatedMessage(NamedTuple):
    """What a rank gets: ``put`` is called when it has travelled for ``latency``."""

    rank: int
    latency: float
    deliver: Callable[[], object]


@dataclass(frozen=True)
class SimulatedAction:
    """What occupies a rank for a time, and what it sends at the end."""

    action: Action
    seconds: float
    messages: Sequence[SimulatedMessage] = ()


Wait = Callable[[], bool]  # whether what a rank waits for is there
Process = Iterator[SimulatedAction | Wait]


class CompletedAction(NamedTuple):
    """An action, and when it ran."""

    action: Action
    start: float
    end: float


class VirtualClock:
    """Runs every rank's process: an iterator of what it does, asked for more when it is free.

    Args:
        processes: of every rank.
    """

    def __init__(self, processes: Sequence[Process]) -> None:
        self._processes = processes
        self._waits: list[Wait | None] = [None] * len(processes)
        self._events: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._order = count()
        self.completed: list[list[CompletedAction]] = [[] for _ in processes]
        self.finished = [False] * len(processes)

    def run(self) -> None:
        """Until every rank has finished, or those that have not wait for ever."""
        for rank in range(len(self._processes)):
            self._at(0.0, _DECISIONS, self._proceeding(rank))
        while self._events:
            time, _, _, event = heapq.heappop(self._events)
            event(time)

    def _at(self, time: float, phase: int, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, phase, next(self._order), event))

    def _proceeding(self, rank: int) -> Callable[[float], None]:
        return lambda time: self._proceed(rank, time)

    def _proceed(self, rank: int, time: float) -> None:
        for request in self._processes[rank]:
            if isinstance(request, SimulatedAction):
                self._begin(rank, request, time)
                return
            if not request():
                self._waits[rank] = request
                return
        self.finished[rank] = True

    def _begin(self, rank: int, action: SimulatedAction, start: float) -> None:
        end = start + action.seconds
        self.completed[rank].append(CompletedAction(action.action, start, end))
        for message in action.messages:
            self._at(end + message.latency, _ARRIVALS, self._arriving(message))
        self._at(end, _DECISIONS, self._proceeding(rank))

    def _arriving(self, message: SimulatedMessage) -> Callable[[float], None]:
        def arrive(time: float) -> None:
            message.deliver()
            self._at(time, _DECISIONS, lambda time: self._look(message.rank, time))

        return arrive

    def _look(self, rank: int, time: float) -> None:
        """Whether a rank that waits may go on."""
        wait = self._waits[rank]
        if wait is not None and wait():
            self._waits[rank] = None
            self._proceed(rank, time)
