"""``python -m pyparallel plan``: every schedule in one table."""

import argparse
import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..gossip import Algorithm, AllReduce
from ..pipeline import PipelineShape, Schedule
from ..pipeline.schedules import GPipe, PipeDream, every_schedule
from ..pipeline.schedules.action import Kind
from ..planning.pipelines import Costs, Simulation, simulate, tabulate
from ..planning.simulate import Links, Pipeline, Profile, parse_algorithm, simulate_run
from ..planning.simulate.links import MBIT, MILLISECOND
from ..training.arguments import check_integer, require
from .simulate import find_given
from .text_table import aligned

EXAMPLE = "python -m pyparallel plan --stages 8 --microbatches 16 --out timelines.png"

_ALGORITHM = "SGP(overlap=1)"
_STEPS = 1000  # about as many are simulated
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
    parser.add_argument("--replicas", type=int, help="simulate --round, all times in seconds")
    parser.add_argument(
        "--algorithm", help=f"of replicas, with schedules that do not flush (default: {_ALGORITHM})"
    )
    parser.add_argument("--rate", type=float, help="of each rank's link, in Mbit/s")
    parser.add_argument("--latency", type=float, help="of a message, in ms (default: 0.1)")
    parser.add_argument("--parameters", type=float, help="of the model, in float32")
    parser.add_argument("--out", type=Path, help="file for a picture of the timelines")


def report(arguments: argparse.Namespace) -> str:
    """Return the table of all schedules; draw their timelines if ``--out`` is given."""
    try:
        schedules = every_schedule(arguments.synchronous_updates)
        gossip, reduced = _rounds(arguments)
        plans = [_plan(each, arguments, reduced if each.flushes else gossip) for each in schedules]
        rows = [describe(plan) for plan in plans]
    except ValueError as error:
        raise SystemExit(f"plan: {error}") from error
    sizes = f"{arguments.stages} stages, {arguments.microbatches} microbatches"
    if arguments.replicas is not None:
        (seconds,), (of_gradients,) = gossip.values(), reduced.values()
        sizes += f"\n{arguments.replicas} replicas: {seconds:.3g} s an update for rounds of "
        sizes += f"{arguments.algorithm or _ALGORITHM}, {of_gradients:.3g} s for AllReduce()"
    lines = [sizes, "", *aligned([_COLUMNS, *rows]), _LEGEND]
    if arguments.out:
        lines += ["", f"picture      {_draw(plans, arguments.out)}"]
    return "\n".join(lines)


def _rounds(arguments: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """Return the costs of a stage's rounds with gossip, and with AllReduce() of gradients.

    The latter is a part of the update; gossip may overlap with what follows it.
    """
    given = find_given(arguments, "replicas", "rate", "parameters", "algorithm", "latency")
    if not given:
        return {"round": arguments.round}, {"update": arguments.round}
    fits = {"replicas", "rate", "parameters"} <= given.keys() and not arguments.round
    rule = "--replicas, --rate and --parameters must be given together, without --round"
    require(fits, rule, ", ".join([*given, *["round"] * bool(arguments.round)]))
    for name, value in (("num_stages", arguments.stages), ("replicas", arguments.replicas)):
        check_integer(name, value)
    algorithm = parse_algorithm(arguments.algorithm or _ALGORITHM, arguments.replicas)
    gossip = _simulate_round(algorithm, PipeDream(), arguments)
    return gossip, _simulate_round(AllReduce(), GPipe(), arguments)


def _simulate_round(
    algorithm: Algorithm, schedule: Schedule, arguments: argparse.Namespace
) -> dict[str, float]:
    """Return the seconds of rounds for an update, the mean of a stage that computes nothing."""
    interval = getattr(algorithm, "interval", 1)
    latency = 1e-4 if arguments.latency is None else arguments.latency * MILLISECOND
    run = simulate_run(
        algorithm, arguments.replicas, Links.uniform(arguments.rate * MBIT, latency), Profile(0.0),
        4 * arguments.parameters / arguments.stages,
        num_steps=interval * max(1, _STEPS // interval), pipeline=Pipeline(schedule, 1, 1),
    )  # fmt: skip
    overlaps = getattr(algorithm, "overlap", 0) or getattr(algorithm, "delay", 0)
    return {"round" if overlaps else "update": run.seconds}


def _plan(
    schedule: Schedule, arguments: argparse.Namespace, rounds: dict[str, float]
) -> _PlannedRun:
    chunks = _CHUNKS if schedule.interleaves else 1
    shape = PipelineShape(arguments.stages * chunks, arguments.microbatches, arguments.stages)
    forward, backward = arguments.forward / chunks, arguments.backward / chunks
    costs = Costs(
        forward, backward, backward / 2, backward / 2, communication=arguments.communication,
        **{part: seconds / chunks for part, seconds in rounds.items()},
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
        *(f"{each:z.1%}" for each in idle),
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
    importlib.import_module("pyparallel.planning.pipelines.picture").draw_timeline(
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
