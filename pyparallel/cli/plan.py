"""``python -m pyparallel plan``: every schedule in one table."""

import argparse
import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..pipeline import Costs, PipelineShape, Schedule, Simulation, simulate, tabulate
from ..pipeline.schedules import every_schedule
from ..pipeline.schedules.action import Kind
from .text_table import aligned

EXAMPLE = "python -m pyparallel plan --stages 8 --microbatches 16 --out timelines.png"

_CHUNKS = 2  # stages on each rank for interleaved schedules
_COLUMNS = (
    "schedule", "bubble, one step", "steady state", "activations", "weights", "staleness",
    "horizon",
)  # fmt: skip
_LEGEND = """
bubble       idle fraction of all ranks' time: in the first step with warm-up and cool-down, and in
             steady state; a wait for a round with replicas is idle, too
activations  peak number of microbatches whose activations a rank holds (for all its stages)
weights      peak number of weight copies that a rank holds
staleness    updates by which a forward's weights are too old, at most (first .. last stage)
horizon      updates that a forward's weights are predicted ahead, at most (first .. last stage)"""


@dataclass(frozen=True)
class _PlannedRun:
    schedule: Schedule
    shape: PipelineShape
    costs: Costs

    def run(self, steps: int) -> Simulation:
        """Simulate ``steps`` steps, from an empty pipeline to an empty pipeline."""
        ranks = range(self.shape.num_ranks)
        actions = (self.schedule.rank_actions(self.shape, rank, steps) for rank in ranks)
        return simulate(tabulate(actions), self.costs, self.schedule.versions(self.shape))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    for name, default, meaning in (
        ("stages", 4, "one rank each"),
        ("microbatches", 8, "in one step"),
        ("forward", 1.0, "time of a stage's forward"),
        ("backward", 2.0, "time of a stage's backward; halved if split"),
        ("communication", 0.0, "time of a message"),
        ("round", 0.0, "time of a stage's round with its replicas, in an update or beside others"),
        ("synchronous-updates", 0, "at the start, of schedules whose gradients are delayed"),
    ):
        parser.add_argument(
            f"--{name}", type=type(default), default=default, help=f"{meaning} (default: {default})"
        )
    parser.add_argument("--out", type=Path, help="file for a picture of the timelines")


def report(arguments: argparse.Namespace) -> str:
    """Return the table of all schedules; draw their timelines if ``--out`` is given."""
    try:
        schedules = every_schedule(arguments.synchronous_updates)
        plans = [_plan(schedule, arguments) for schedule in schedules]
        rows = [describe(plan) for plan in plans]
    except ValueError as error:
        raise SystemExit(f"plan: {error}") from error
    sizes = f"{arguments.stages} stages, {arguments.microbatches} microbatches"
    lines = [sizes, "", *aligned([_COLUMNS, *rows]), _LEGEND]
    if arguments.out:
        lines += ["", f"picture      {_draw(plans, arguments.out)}"]
    return "\n".join(lines)


def _plan(schedule: Schedule, arguments: argparse.Namespace) -> _PlannedRun:
    chunks = _CHUNKS if schedule.interleaves else 1
    shape = PipelineShape(arguments.stages * chunks, arguments.microbatches, arguments.stages)
    forward, backward = arguments.forward / chunks, arguments.backward / chunks
    # AllReduce() of gradients is a part of the update; gossip overlaps with what follows it.
    part = "update" if schedule.flushes else "round"
    costs = Costs(
        forward, backward, backward / 2, backward / 2, communication=arguments.communication,
        **{part: arguments.round / chunks},
    )  # fmt: skip
    return _PlannedRun(schedule, shape, costs)


def describe(plan: _PlannedRun) -> tuple[str, ...]:
    """Return a schedule's row of the table."""
    # Enough steps to reach steady state, however few microbatches.
    shape, start = plan.shape, int(plan.schedule.synchronous_updates)
    warm_up = 2 + 2 * shape.num_stages // shape.num_microbatches
    warm_up += start * plan.schedule.microbatches_per_update(shape) // shape.num_microbatches
    once, before, after = plan.run(1), plan.run(warm_up), plan.run(warm_up + 4)
    # In units of all stages of a rank, of which one stage's activations are a fraction.
    activations = after.peak_activations_of_ranks.max() / shape.stages_per_rank
    steady = after.makespan - before.makespan, _busy(after) - _busy(before)
    idle = [
        1 - busy / (time * after.table.num_ranks)
        for time, busy in [(once.makespan, _busy(once)), steady]
    ]
    return (
        _name(plan),
        *(f"{each:.1%}" for each in idle),
        f"{activations:g}",
        f"{after.weights.copies.max()}",
        _span(after.forward_staleness),
        _span(after.forward_horizon),
    )


def _busy(run: Simulation) -> float:
    """Return the time of all ranks in forwards and backwards; in updates they wait for a round."""
    computes = run.table.rows[:, 1] != Kind.UPDATE
    return float((run.ends - run.starts)[computes].sum())


def _name(plan: _PlannedRun) -> str:
    per_rank = plan.shape.stages_per_rank
    part = f", {per_rank} stages per rank" if per_rank > 1 else ""
    # The options that differ between schedules of one class.
    options = [name for name in ("variant", "weights") if hasattr(plan.schedule, name)]
    shown = ", ".join(f"{name}={getattr(plan.schedule, name)!r}" for name in options)
    return type(plan.schedule).__name__ + (f"({shown})" if shown else "") + part


def _span(of_stages: np.ndarray) -> str:
    first, last = int(of_stages[0]), int(of_stages[-1])
    return f"{first}" if (of_stages == first).all() else f"{first} .. {last}"


def _draw(plans: list[_PlannedRun], path: Path) -> str:
    if importlib.util.find_spec("matplotlib") is None:
        return "none: matplotlib is not installed"
    importlib.import_module("pyparallel.pipeline.simulation.picture").draw_timeline(
        _timelines(plans), path
    )
    return str(path)


def _timelines(plans: list[_PlannedRun]) -> dict[str, Simulation]:
    """Return two steps of each schedule; one timeline for schedules that run in the same order."""
    by_order: dict[bytes, tuple[list[str], Simulation]] = {}
    for plan in plans:
        run = plan.run(2)
        computed = run.ends > run.starts
        order = run.table.rows[computed].tobytes() + run.starts[computed].tobytes()
        by_order.setdefault(order, ([], run))[0].append(_name(plan))
    return {", ".join(names): run for names, run in by_order.values()}
