"""``python -m pyparallel simulate``: a run on any number of ranks, before renting them."""

import argparse
import importlib
import importlib.util
import itertools
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..gossip import Algorithm, AllReduce
from ..pipeline import OneForwardOneBackward
from ..planning.simulate import (
    Failures,
    Links,
    LogisticRegression,
    Pipeline,
    Profile,
    Quadratic,
    SimulatedRun,
    Stragglers,
    parse_algorithm,
    parse_schedule,
    simulate_run,
)
from ..planning.simulate.links import MBIT, MILLISECOND
from ..planning.simulate.objectives import Objective
from ..training.arguments import require
from .text_table import aligned

EXAMPLE = (
    'python -m pyparallel simulate --ranks 64 --algorithm "SGP(overlap=1)" '
    "--rate 1000 --compute 0.5 --stragglers lognormal:0.1"
)

_WIDTH = 80  # of a narrow terminal or notebook
_COLUMNS = (
    "step", "10-90 %", "waiting", "MB sent", "goodput", "steps/h", "mixing",
)  # fmt: skip
_OBJECTIVES = {"quadratic": Quadratic, "logistic": LogisticRegression}
_LEGEND = """
step       seconds, mean over ranks and steps
10-90 %    of a rank's steps
waiting    share of a step without computing, encoding or the optimizer's step
MB sent    in a step, by the network card of the machine that sends most
goodput    share of time spent on steps that count, with the failures
steps/h    that count
mixing     distance of random values from their mean after all steps, over the
           first
{}
All is simulated. Messages are float32 without a compressor, whose errors do
not count."""
_CONSENSUS = """\
consensus  the same of values that each rank changes in each update by a random
           number of variance 1, mean over the second half of the steps"""
_LOSS = """\
loss       of the mean of the ranks' parameters, minus the least one, mean over
           the last tenth of the steps; ranks train by SGD"""
_EXACT = 1e-9  # an average, but for rounding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--ranks", type=int, default=8, help="(default: 8)")
    parser.add_argument(
        "--algorithm",
        action="append",
        help="as in Python, topologies without the number of ranks; may be repeated; AllReduce() "
        "is always compared (default: SGP(overlap=1))",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--parameters", type=float, default=25e6, help="in float32 (default: 25e6)")
    size.add_argument("--message-bytes", type=float, help="of the model instead")
    parser.add_argument("--compute", type=float, help="seconds of forward and backward")
    parser.add_argument("--profile", type=Path, help="JSON file of measured seconds instead")
    parser.add_argument("--links", type=Path, help="TOML file of rates, latencies and machines")
    parser.add_argument("--rate", type=float, help="of each rank's link instead, in Mbit/s")
    parser.add_argument("--latency", type=float, help="of a message, in ms (default: 0.1)")
    parser.add_argument(
        "--all-reduce", choices=("ring", "tree"), help="with --rate (default: tree)"
    )
    parser.add_argument(
        "--stragglers", default="", help="such as lognormal:0.1 or slow:0=3.0, commas between"
    )
    parser.add_argument(
        "--failures",
        help="mtbf=SECONDS in the run, restart=300, checkpoint=600, detect=2, learners=0",
    )
    parser.add_argument("--stages", type=int, help="of a pipeline, of which ranks have replicas")
    parser.add_argument(
        "--schedule", help="of the stages, as in Python (default: OneForwardOneBackward())"
    )
    parser.add_argument("--microbatches", type=int, help="of a step of stages (default: 8)")
    parser.add_argument(
        "--activation-bytes", type=float, help="of a message of a microbatch between two stages"
    )
    parser.add_argument("--rounds", type=int, default=1000, help="steps (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument(
        "--loss", choices=_OBJECTIVES, help="train on it, and show the loss instead of consensus"
    )
    parser.add_argument("--learning-rate", type=float, help="of SGD (default: 0.1)")
    parser.add_argument(
        "--heterogeneity", type=float, help="of the ranks' shards; 0: all the same (default: 1)"
    )
    parser.add_argument("--out", type=Path, help="file for a picture")


def report(arguments: argparse.Namespace) -> str:
    """Return the table of the algorithms and AllReduce(); draw them if ``--out`` is given."""
    try:
        require(arguments.ranks >= 1, "--ranks must be at least 1", arguments.ranks)
        profile = _profile(arguments)
        links = _links(arguments, profile)
        of_parameters = 4 * arguments.parameters
        num_bytes = of_parameters if arguments.message_bytes is None else arguments.message_bytes
        pipeline = _pipeline(arguments)
        failures = None if arguments.failures is None else Failures.parse(arguments.failures)
        objective = _objective(arguments)
        runs = {
            name: simulate_run(
                algorithm,
                arguments.ranks,
                links,
                profile,
                num_bytes,
                num_steps=arguments.rounds,
                stragglers=Stragglers.parse(arguments.stragglers),
                failures=failures,
                seed=arguments.seed,
                pipeline=of_run,
                objective=objective,
            )
            for name, (algorithm, of_run) in _named(arguments, pipeline).items()
        }
    except ValueError as error:
        raise SystemExit(f"simulate: {error}") from error
    machines = -(-arguments.ranks // links.ranks_per_machine)
    head = (
        f"{arguments.ranks:,} ranks on {machines:,} machines, a model of {num_bytes / 1e6:,.1f} "
        f"MB, computing {profile.computing:g} s, {arguments.rounds:,} steps"
    )
    if pipeline is not None:
        head += f"; replicas of {pipeline.num_stages} stages with {pipeline.num_microbatches} "
        head += f"microbatches, {pipeline.schedule!r}"
    last, legend = ("consensus", _CONSENSUS) if objective is None else ("loss", _LOSS)
    header, *rows = aligned([(*_COLUMNS, last), *describe(runs.values())])
    table = itertools.chain(*zip(runs, rows, strict=True))  # a row below the algorithm's name
    lines = [*textwrap.wrap(head, _WIDTH), "", header, *table, _LEGEND.format(legend)]
    if arguments.out:
        lines += ["", f"picture  {_draw(runs, arguments.out)}"]
    return "\n".join(lines)


def describe(runs: Iterable[SimulatedRun]) -> Sequence[tuple[str, ...]]:
    """Return the rows of the table."""
    return [
        (
            f"{run.seconds:.3f}",
            f"{run.range[0]:.3f}-{run.range[1]:.3f}",
            f"{run.waiting / run.seconds:.1%}",
            f"{run.card_bytes / 1e6:,.1f}",
            f"{run.goodput:.1%}",
            f"{3600 * run.goodput / run.seconds:,.0f}",
            f"{run.mixing_errors[-1]:.1e}" if run.mixing_errors[-1] > _EXACT else "exact",
            f"{run.consensus_distance:.2f}" if run.loss is None else f"{run.loss:.2e}",
        )
        for run in runs
    ]


def _named(
    arguments: argparse.Namespace, pipeline: Pipeline | None
) -> dict[str, tuple[Algorithm, Pipeline | None]]:
    """Return what to simulate by the names of rows, AllReduce() last, where a pipeline flushes."""
    texts = arguments.algorithm or ["SGP(overlap=1)"]
    num_ranks = max(1, arguments.ranks // (pipeline.num_stages if pipeline else 1))
    named = {text: (parse_algorithm(text, num_ranks), pipeline) for text in texts}
    if pipeline is None or pipeline.schedule.flushes:
        return {**named, "AllReduce()": (AllReduce(), pipeline)}
    flushing = replace(pipeline, schedule=OneForwardOneBackward())
    return {**named, "AllReduce() of OneForwardOneBackward()": (AllReduce(), flushing)}


def _pipeline(arguments: argparse.Namespace) -> Pipeline | None:
    given = find_given(arguments, "stages", "activation_bytes", "schedule", "microbatches")
    if not given:
        return None
    rule = "--stages and --activation-bytes must be given with a pipeline"
    require({"stages", "activation_bytes"} <= given.keys(), rule, ", ".join(given))
    schedule = parse_schedule(given.get("schedule", "OneForwardOneBackward()"))
    microbatches = given.get("microbatches", 8)
    return Pipeline(schedule, arguments.stages, microbatches, arguments.activation_bytes)


def find_given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the options that are given."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _profile(arguments: argparse.Namespace) -> Profile:
    given = [arguments.compute is not None, arguments.profile is not None]
    require(sum(given) == 1, "one of --compute and --profile must be given", sum(given))
    if given[1]:
        return Profile.read(arguments.profile)
    require(arguments.compute > 0, "--compute must be greater than 0", arguments.compute)
    return Profile(arguments.compute)


def _objective(arguments: argparse.Namespace) -> Objective | None:
    given = find_given(arguments, "learning_rate", "heterogeneity")
    if arguments.loss is None:
        rule = "--learning-rate and --heterogeneity must come with --loss"
        require(not given, rule, ", ".join(given))
        return None
    found: Objective = _OBJECTIVES[arguments.loss](**{"learning_rate": 0.1, **given})
    return found


def _links(arguments: argparse.Namespace, profile: Profile) -> Links:
    given = find_given(arguments, "rate", "latency", "all_reduce")
    if arguments.links is not None:
        rule = "--links must come without --rate, --latency and --all-reduce"
        require(not given, rule, ", ".join(given))
        return Links.read(arguments.links, arguments.ranks)
    rate = given["rate"] * MBIT if "rate" in given else profile.rate
    if rate is None:
        raise ValueError("--links or --rate must be given, or a profile with a rate, got none")
    latency = given["latency"] * MILLISECOND if "latency" in given else profile.latency
    return Links.uniform(
        rate, 1e-4 if latency is None else latency, given.get("all_reduce", "tree")
    )


def _draw(runs: dict[str, SimulatedRun], path: Path) -> str:
    if importlib.util.find_spec("matplotlib") is None:
        return "none: matplotlib is not installed"
    importlib.import_module("pyparallel.planning.simulate.picture").draw(runs, path)
    return str(path)
