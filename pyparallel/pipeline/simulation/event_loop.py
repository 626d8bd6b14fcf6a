"""The event loop that computes each action's start time: the reference and the compiled one."""

import importlib.util
import json
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..schedules.action import Kind
from .action_table import ActionTable

EventLoop = Callable[
    [np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, int],
    tuple[np.ndarray, np.ndarray],
]


def run_reference(
    rows: np.ndarray,
    offsets: np.ndarray,
    rank_of_stage: np.ndarray,
    durations: np.ndarray,
    latencies: np.ndarray,
    num_microbatches: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Run each rank's rows in order, each as soon as the rank is free and its inputs are ready.

    A forward waits for the previous stage, a backward for its own forward and the next stage, the
    weight part for the input part, an update for its microbatch's gradient. Any number of messages
    can be buffered.

    Args:
        rows: (n, 3) int32 of an ``ActionTable``.
        offsets: (num_ranks + 1,) int64 of the same.
        rank_of_stage: (num_stages,) int64.
        durations: (kinds, num_stages) float64.
        latencies: (num_stages,) float64, between a stage and the next.
        num_microbatches: more than any microbatch in ``rows``.

    Returns:
        (n,) float64 start times, NaN for rows that never run; (num_ranks,) int64 rows that each
        rank has run.
    """
    return _Reference(rows, offsets, rank_of_stage, durations, latencies).run()


class _Reference:
    """The state of a run: the end times of actions and the next row of each rank."""

    def __init__(
        self,
        rows: np.ndarray,
        offsets: np.ndarray,
        rank_of_stage: np.ndarray,
        durations: np.ndarray,
        latencies: np.ndarray,
    ) -> None:
        self.rows: list[list[int]] = rows.tolist()
        self.bounds = offsets.tolist()
        self.next = self.bounds[:-1]
        self.rank_of_stage: list[int] = rank_of_stage.tolist()
        self.durations: list[list[float]] = durations.tolist()
        self.latencies: list[float] = latencies.tolist()
        self.last_stage = len(self.rank_of_stage) - 1
        self.free = [0.0] * len(self.next)
        self.ends: dict[tuple[int, int, int], float] = {}
        self.starts = np.full(len(rows), np.nan)

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        """Advance each rank as far as possible, and again each time an input arrives."""
        runnable = list(range(len(self.next)))
        while runnable:
            self.advance(runnable.pop(), runnable)
        done = np.array(self.next, dtype=np.int64) - np.array(self.bounds[:-1], dtype=np.int64)
        return self.starts, done

    def advance(self, rank: int, runnable: list[int]) -> None:
        """Run a rank until it must wait; append the ranks that receive its results."""
        while self.next[rank] < self.bounds[rank + 1]:
            stage, kind, microbatch = self.rows[self.next[rank]]
            ready = self.ready_time(stage, kind, microbatch)
            if ready is None:
                return
            start = max(self.free[rank], ready)
            self.free[rank] = end = start + self.durations[kind][stage]
            self.starts[self.next[rank]] = start
            self.next[rank] += 1
            for done in _parts(kind):
                self.ends[stage, done, microbatch] = end
            receiver = self.receiver(stage, kind)
            if receiver is not None and receiver != rank:
                runnable.append(receiver)

    def ready_time(self, stage: int, kind: int, microbatch: int) -> float | None:
        """Return when the last input of an action is ready; None: not yet known."""
        times = [self.arrival(stage, *each, microbatch) for each in self.dependencies(stage, kind)]
        known = [time for time in times if time is not None]
        return max(known, default=0.0) if len(known) == len(times) else None

    def dependencies(self, stage: int, kind: int) -> list[tuple[int, int]]:
        """Return stage and kind of the actions that an action waits for."""
        if kind == Kind.FORWARD:
            return [(stage - 1, Kind.FORWARD)] if stage > 0 else []
        if kind == Kind.BACKWARD_WEIGHT:
            return [(stage, Kind.BACKWARD_INPUT)]
        if kind == Kind.UPDATE:
            return [(stage, Kind.BACKWARD_WEIGHT)]
        next_stage = [(stage + 1, Kind.BACKWARD_INPUT)] if stage < self.last_stage else []
        return [(stage, Kind.FORWARD), *next_stage]

    def arrival(self, stage: int, source: int, kind: int, microbatch: int) -> float | None:
        """Return when the result of another action is ready on this stage; None: not yet known."""
        end = self.ends.get((source, kind, microbatch))
        if end is None or self.rank_of_stage[source] == self.rank_of_stage[stage]:
            return end
        return end + self.latencies[min(source, stage)]

    def receiver(self, stage: int, kind: int) -> int | None:
        """Return the rank that receives the result of an action, if any."""
        if kind == Kind.FORWARD and stage < self.last_stage:
            return self.rank_of_stage[stage + 1]
        if kind in {Kind.BACKWARD, Kind.BACKWARD_INPUT} and stage > 0:
            return self.rank_of_stage[stage - 1]
        return None


def _parts(kind: int) -> tuple[int, ...]:
    """Return the parts of an action: a full backward has both parts."""
    whole = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    return whole if kind == Kind.BACKWARD else (kind,)


@dataclass(frozen=True)
class Compiled:
    """The event loop in C++, or the problem for which there is none."""

    path: Path
    loop: EventLoop | None = None
    problem: str | None = None


def load_compiled(folder: Path) -> Compiled:
    """Load the extension module built for this Python from a folder, if possible."""
    path = folder / f"simulate{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not path.exists():
        return Compiled(path, problem=_build_outcome(folder))
    spec = importlib.util.spec_from_file_location("simulate", path)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        return Compiled(path, problem=f"built, but it does not load: {error}")
    return Compiled(path, module.run)


def _build_outcome(folder: Path) -> str:
    report = folder / "build.json"
    if not report.exists():
        return "not built: the package is used without having been installed"
    outcome = str(json.loads(report.read_text()).get("simulate", "not built"))
    return f"{outcome}, for another Python" if outcome.startswith("built") else outcome


COMPILED = load_compiled(Path(__file__).resolve().parents[2] / "_native")
run: EventLoop = COMPILED.loop or run_reference


def run_table(
    table: ActionTable, durations: np.ndarray, latencies: np.ndarray, loop: EventLoop = run
) -> tuple[np.ndarray, np.ndarray]:
    """Run the event loop on a table checked by ``validate``; see ``run_reference``."""
    rank_of_stage = table.rank_of_stage
    known = durations[: Kind.UPDATE + 1]  # the other kinds are Interlocking's
    return loop(table.rows, table.offsets, rank_of_stage, known, latencies, table.num_microbatches)
