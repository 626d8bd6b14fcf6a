"""``python -m pyparallel recommend``: seconds per step with each compressor, and what to use."""

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from ..comm import wait_for_store
from ..planning.recommend.benchmark import Measurements, Progress, benchmark, benchmark_ranks
from ..planning.recommend.candidates import CANDIDATES, DENSE, HALF
from ..planning.recommend.model import NOISE, Link, StepTime, choose
from ..planning.recommend.workload import Workload, load, transformer
from ..planning.simulate import Links, Profile, Stragglers
from ..planning.simulate.links import MBIT, MILLISECOND
from ..training.arguments import require
from .text_table import aligned

EXAMPLE = "python -m pyparallel recommend --parameters 25e6 --bandwidth 1000 --ranks 4"

_COLUMNS = (
    "compressor", "messages", "of fp32", "sent", "coding", "communication", "step", "vs fp32",
    "vs bf16",
)  # fmt: skip
_ALGORITHM_COLUMNS = (
    "algorithm", "every", "sent", "bits a parameter and step", "waiting", "step", "vs fp32",
)  # fmt: skip
_LEGEND = """
fp32           DistributedDataParallel alone: gradients as they are
messages       bytes that a rank encodes in a step, indices and scales included
sent           bytes that it sends; a message may be sent more than once
coding         encoding and decoding, measured on this machine
communication  sent bytes / bandwidth + collectives x latency
step           forward, then backward and coding of each bucket, overlapped with the communication
               of the previous one; the optimizer's update is that of the profile, if one is given
Step times are those of simulated runs, as of `python -m pyparallel simulate`; times are divided
among buckets in proportion to their bytes. Accuracy is not predicted: compare it on a short run."""
_CLEAR_LINE = "\r\x1b[K"  # of a terminal
_MEASURED = ("bandwidth", "latency", "ranks", "profile")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--model",
        metavar="PACKAGE.MODULE:FUNCTION",
        help="a function that returns (module, batch, loss); loss(module, batch) is a 0-d tensor",
    )
    what.add_argument("--parameters", type=float, help="size of a byte-level transformer")
    parser.add_argument(
        "--batch", type=int, default=8, help="batch size of the transformer (default: 8)"
    )
    parser.add_argument("--length", type=int, default=128, help="bytes per sample (default: 128)")
    parser.add_argument("--bandwidth", type=float, help="of the link, Mbit/s in each direction")
    parser.add_argument("--latency", type=float, help="of a collective, ms (default: 0.2)")
    parser.add_argument(
        "--ranks",
        type=int,
        help="number of ranks (default: 2); torchrun measures ranks, bandwidth, latency",
    )
    parser.add_argument("--profile", type=Path, help="JSON file of a step measured elsewhere")
    parser.add_argument("--stragglers", default="", help="such as lognormal:0.1 or slow:0=3.0")
    parser.add_argument("--save-profile", type=Path, help="file for the seconds, for simulate")


def report(arguments: argparse.Namespace) -> str:
    """Return the table of all compressors and a recommendation; empty on ranks other than 0."""
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return _on_ranks(arguments)
        return _on_one(arguments)
    except (ValueError, ConnectionError) as error:
        raise SystemExit(f"recommend: {error}") from error


def _on_one(arguments: argparse.Namespace) -> str:
    compute = None if arguments.profile is None else Profile.read(arguments.profile)
    link = _link(arguments, compute)
    stragglers = Stragglers.parse(arguments.stragglers)
    stragglers.check_ranks(link.num_ranks)
    workload = _workload(arguments)
    with _progress() as show:
        found = benchmark(workload, link, show, compute)
    return _text(workload, replace(found, stragglers=stragglers), arguments.save_profile)


def _link(arguments: argparse.Namespace, compute: Profile | None) -> Link:
    """Return the link that is given; what is not, is the profile's."""
    ranks = 2 if arguments.ranks is None else arguments.ranks
    require(ranks >= 1, "--ranks must be at least 1", ranks)
    latency = 0.2 if arguments.latency is None else arguments.latency
    require(0 <= latency < math.inf, "--latency must be finite and not negative", latency)
    latency *= MILLISECOND
    rate = arguments.bandwidth and arguments.bandwidth * MBIT
    if compute is not None and arguments.latency is None and compute.latency is not None:
        latency = Links.uniform(1.0, compute.latency).all_reduce_seconds(0.0, ranks, ranks)
    if compute is not None and rate is None:
        rate = compute.rate
    rule = "--bandwidth must be given in Mbit/s, or a --profile with a rate, or the command started"
    require(rate is not None, f"{rule} with torchrun, which measures the link", "none")
    require(0 < rate < math.inf, "--bandwidth must be greater than 0 and finite", rate / MBIT)
    return Link(rate, latency, ranks)


def _on_ranks(arguments: argparse.Namespace) -> str:
    """Report for the measured link between the ranks; the slowest rank counts."""
    given = [name for name in _MEASURED if getattr(arguments, name) is not None]
    if given:
        raise ValueError(
            f"--{given[0]} must not be given under torchrun, which measures the link and a step, "
            f"got {getattr(arguments, given[0])}"
        )
    stragglers = Stragglers.parse(arguments.stragglers)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    wait_for_store()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        stragglers.check_ranks(dist.get_world_size())
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        workload = _workload(arguments)
        with _progress() as show:
            found = replace(benchmark_ranks(workload, device, show), stragglers=stragglers)
        return _text(workload, found, arguments.save_profile) if dist.get_rank() == 0 else ""
    finally:
        dist.destroy_process_group()


@contextmanager
def _progress() -> Iterator[Progress]:
    """Yield a function that writes what is measured now to stderr, on rank 0."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    on_terminal = sys.stderr.isatty()

    def write(text: str) -> None:
        if is_first:
            sys.stderr.write(text)
            sys.stderr.flush()

    def show(step: int, total: int, what: str) -> None:
        text = f"measuring {step} of {total}: {what}"
        write(f"{_CLEAR_LINE}{text}" if on_terminal else f"{text}\n")

    try:
        yield show
    finally:
        if on_terminal:
            write(_CLEAR_LINE)


def _workload(arguments: argparse.Namespace) -> Workload:
    if arguments.model is not None:
        return load(arguments.model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return transformer(arguments.parameters, arguments.batch, arguments.length, device)


def _text(workload: Workload, found: Measurements, path: Path | None) -> str:
    compute, link, predictions = found.compute, found.link, found.predictions
    if path is not None:
        (uplink,) = link.links.uplinks
        replace(compute, rate=uplink.rate, latency=uplink.latency).write(path)
    forward = 1e3 * compute.computing * compute.forward_share
    backward = 1e3 * compute.computing - forward
    return "\n".join(
        [
            f"{workload.num_parameters / 1e6:,.1f} M parameters in {len(workload.buckets)} "
            f"buckets: forward {forward:,.1f} ms, backward {backward:,.1f} ms",
            f"{link.num_ranks} ranks, {link.bytes_per_second * 8e-6:,.0f} Mbit/s, latency "
            f"{1e3 * link.latency:.3g} ms",
            "",
            *aligned([_COLUMNS, *describe(predictions, workload.num_parameters)]),
            _LEGEND,
            "",
            *aligned([_ALGORITHM_COLUMNS, *describe_algorithms(found, workload.num_parameters)]),
            "",
            advise(predictions),
            *advise_algorithms(predictions, found.algorithm_predictions),
        ]
    )


def describe(predictions: Sequence[StepTime], num_parameters: int) -> list[tuple[str, ...]]:
    """Return the rows of the table, the fastest first."""
    by_name = {prediction.name: prediction for prediction in predictions}
    return [
        (
            each.name,
            f"{each.cost.payload_bytes / 1e6:,.2f} MB",
            f"{each.cost.payload_bytes / (4 * num_parameters):.1%}",
            f"{each.cost.wire_bytes / 1e6:,.2f} MB",
            f"{1e3 * each.cost.coding:,.1f} ms",
            f"{1e3 * each.communication:,.1f} ms",
            f"{1e3 * each.step:,.1f} ms",
            f"{by_name[DENSE.name].step / each.step:.2f}x",
            f"{by_name[HALF.name].step / each.step:.2f}x",
        )
        for each in sorted(predictions, key=lambda each: each.step)
    ]


def advise(predictions: Sequence[StepTime]) -> str:
    """Return the recommendation; predictions as for `choose`, with fp32 and bf16."""
    best = choose(predictions)
    by_name = {prediction.name: prediction for prediction in predictions}
    speedups = {name: by_name[name].step / best.step for name in (DENSE.name, HALF.name)}
    if best.name == DENSE.name:
        return f"Use plain fp32: no compressor shortens a step by more than {NOISE:.0%}."
    if best.name == HALF.name:
        return (
            f"Use plain bf16: {speedups[DENSE.name]:.2f} times as fast as fp32, and no compressor "
            f"is faster than all simpler ones by more than {NOISE:.0%}."
        )
    compressor = next(each.compressor for each in CANDIDATES if each.name == best.name)
    return (
        f"Use {best.name}, {compressor}: {speedups[DENSE.name]:.2f} times as fast as fp32 and "
        f"{speedups[HALF.name]:.2f} times as fast as bf16."
    )


def describe_algorithms(found: Measurements, num_parameters: int) -> list[tuple[str, ...]]:
    """Return the rows of the table of algorithms: steps between averages, bytes of each."""
    dense = next(prediction for prediction in found.predictions if prediction.name == DENSE.name)
    lines: list[tuple[str, ...]] = []
    for algorithm, each in zip(found.algorithms, found.algorithm_predictions, strict=True):
        interval = getattr(algorithm, "interval", 1)
        lines.append((
            each.name,
            "1 step" if interval == 1 else f"{interval} steps",
            f"{each.cost.wire_bytes / 1e6:,.2f} MB",
            f"{8 * each.cost.wire_bytes / num_parameters / interval:.2g}",
            f"{each.waiting:.0%}",
            f"{1e3 * each.step:,.1f} ms",
            f"{dense.step / each.step:.2f}x",
        ))  # fmt: skip
    return lines


def advise_algorithms(predictions: Sequence[StepTime], algorithms: Sequence[StepTime]) -> list[str]:
    """Return what to say of algorithms: something where one is faster than any compressor."""
    found, best = choose(predictions), choose(algorithms)
    if best.step >= (1 - NOISE) * found.step:
        return []
    of_pairs = "overlap=1" if best.name == "SGP" else ""
    return [
        f"Averages of weights are faster still: gossip.{best.name}({of_pairs}) "
        f"{found.step / best.step:.2f} times as fast as that. They change the training more than a "
        "compressor does: compare the loss."
    ]
