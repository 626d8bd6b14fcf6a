"""The event loop that computes each action's start time: the reference and the compiled one."""

import importlib.util
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ...ops._library import build_outcome
from ...pipeline.schedules.action import Action, Kind
from .action_table import ActionTable
from .virtual_clock import Process, SimulatedAction, SimulatedMessage, VirtualClock

_Result = tuple[int, int, int]  # stage, kind, microbatch
_ROUND = -1  # the kind of a round with other replicas
EventLoop = Callable[
    [np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]
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

    Arguments are those of an ``ActionTable`` and of ``Costs``, with more microbatches than any in
    ``rows``. Return (n,) float64 start times, NaN for rows that never run, and (num_ranks,) int64
    rows that each rank has run.
    """
    table: list[list[int]] = rows.tolist()
    bounds: list[int] = offsets.tolist()
    ranks: list[int] = rank_of_stage.tolist()
    results: list[set[_Result]] = [set() for _ in bounds[1:]]  # that each rank has
    latencies, rounds = latencies

    def process(rank: int) -> Process:
        last_round: dict[int, set[_Result]] = {}  # of each stage
        for stage, kind, microbatch in table[bounds[rank] : bounds[rank + 1]]:
            needed = {(*each, microbatch) for each in _dependencies(stage, kind, len(ranks))}
            messages = []
            if kind == Kind.UPDATE:
                needed |= last_round.get(stage, set())
                last_round[stage] = {(stage, _ROUND, microbatch)}
                end_round = partial(results[rank].update, last_round[stage])
                messages.append(SimulatedMessage(rank, float(rounds[stage]), end_round))
            yield partial(results[rank].issuperset, needed)
            done = [(stage, part, microbatch) for part in _parts(kind)]
            receiver = _receiver(stage, kind)
            if 0 <= receiver < len(ranks) and ranks[receiver] != rank:
                deliver = partial(results[ranks[receiver]].update, done)
                latency = float(latencies[min(stage, receiver)])
                messages.append(SimulatedMessage(ranks[receiver], latency, deliver))
            action = Action(stage, Kind(kind), microbatch)
            yield SimulatedAction(action, float(durations[kind, stage]), messages)
            results[rank].update(done)

    clock = VirtualClock([process(rank) for rank in range(len(results))])
    clock.run()
    starts = np.full(len(table), np.nan)
    for first, ran in zip(bounds, clock.completed, strict=False):
        starts[first : first + len(ran)] = [each.start for each in ran]
    return starts, np.array([len(ran) for ran in clock.completed], dtype=np.int64)


def _dependencies(stage: int, kind: int, num_stages: int) -> list[tuple[int, int]]:
    if kind == Kind.FORWARD:
        return [(stage - 1, Kind.FORWARD)] if stage > 0 else []
    if kind == Kind.BACKWARD_WEIGHT:
        return [(stage, Kind.BACKWARD_INPUT)]
    if kind == Kind.UPDATE:
        return [(stage, Kind.BACKWARD_WEIGHT)]
    next_stage = [(stage + 1, Kind.BACKWARD_INPUT)] if stage < num_stages - 1 else []
    return [(stage, Kind.FORWARD), *next_stage]


def _receiver(stage: int, kind: int) -> int:
    """Return the stage that an action's output is sent to, whether or not it exists."""
    if kind == Kind.FORWARD:
        return stage + 1
    return stage - 1 if kind in {Kind.BACKWARD, Kind.BACKWARD_INPUT} else -1


def _parts(kind: int) -> tuple[int, ...]:
    whole = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    return whole if kind == Kind.BACKWARD else (kind,)


@dataclass(frozen=True)
class Compiled:
    """The event loop in C++, or the reason why it is not available."""

    path: Path
    loop: EventLoop | None = None
    unavailable_reason: str | None = None


def load_compiled(folder: Path) -> Compiled:
    """Load the extension module built for this Python from a folder, if possible."""
    path = folder / f"simulate{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not path.exists():
        outcome = build_outcome(folder, "simulate")
        other = ", for another Python" if outcome.startswith("built") else ""
        return Compiled(path, unavailable_reason=outcome + other)
    spec = importlib.util.spec_from_file_location("simulate", path)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        return Compiled(path, unavailable_reason=f"built, but it does not load: {error}")
    return Compiled(path, module.run)


COMPILED = load_compiled(Path(__file__).resolve().parents[2] / "_native")
run: EventLoop = COMPILED.loop or run_reference


def run_table(
    table: ActionTable, durations: np.ndarray, latencies: np.ndarray, loop: EventLoop = run
) -> tuple[np.ndarray, np.ndarray]:
    """Run the event loop on a table checked by ``validate``; see ``run_reference``."""
    rank_of_stage = table.rank_of_stage
    known = durations[: Kind.UPDATE + 1]  # the other kinds are Interlocking's
    return loop(table.rows, table.offsets, rank_of_stage, known, latencies, table.num_microbatches)
