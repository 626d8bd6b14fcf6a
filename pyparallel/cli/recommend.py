"""``python -m pyparallel recommend``: seconds per step with each compressor, and what to use."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from ..comm import wait_for_store
from ..recommend.benchmark import Measurements, Progress, benchmark, benchmark_ranks
from ..recommend.candidates import CANDIDATES, DENSE, HALF, OUTER_STEPS
from ..recommend.model import NOISE, Link, StepTime, choose
from ..recommend.workload import Workload, load, transformer
from ..simulate import Profile
from ..training.arguments import require
from .text_table import aligned

EXAMPLE = "python -m pyparallel recommend --parameters 25e6 --bandwidth 1000 --ranks 4"

_COLUMNS = (
    "compressor", "messages", "of fp32", "sent", "coding", "communication", "step", "vs fp32",
    "vs bf16",
)  # fmt: skip
_OUTER_COLUMNS = (
    "outer steps", "every", "sent", "bits a parameter and step", "waiting", "step", "vs fp32",
)  # fmt: skip
_LEGEND = """
fp32           DistributedDataParallel alone: gradients as they are
messages       bytes that a rank encodes in a step, indices and scales included
sent           bytes that it sends; a message may be sent more than once
coding         encoding and decoding, measured on this machine
communication  sent bytes / bandwidth + collectives x latency
step           forward, then backward and coding of each bucket, overlapped with the communication
               of the previous one; without the optimizer's update
Step times are predicted; times are divided among buckets in proportion to their bytes. Accuracy is
not predicted: compare it on a short run."""
_CLEAR_LINE = "\r\x1b[K"  # of a terminal
_LINK_OPTIONS = ("bandwidth", "latency", "ranks")


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
    parser.add_argument("--profile", type=Path, help="file for the measured seconds, for simulate")


def report(arguments: argparse.Namespace) -> str:
    """Return the table of all compressors and a recommendation; empty on ranks other than 0."""
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return _on_ranks(arguments)
        return _on_one(arguments)
    except (ValueError, ConnectionError) as error:
        raise SystemExit(f"recommend: {error}") from error


def _on_one(arguments: argparse.Namespace) -> str:
    rule = "--bandwidth must be given in Mbit/s, or the command started with torchrun, which "
    require(arguments.bandwidth is not None, f"{rule}measures the link", "none")
    latency = 0.2 if arguments.latency is None else arguments.latency
    ranks = 2 if arguments.ranks is None else arguments.ranks
    require(arguments.bandwidth > 0, "--bandwidth must be greater than 0", arguments.bandwidth)
    require(latency >= 0, "--latency must not be negative", latency)
    require(ranks >= 1, "--ranks must be at least 1", ranks)
    link = Link(arguments.bandwidth * 1e6 / 8, latency / 1e3, ranks)
    workload = _workload(arguments)
    with _progress() as show:
        found = benchmark(workload, link, show)
    return _text(workload, found, arguments.profile)


def _on_ranks(arguments: argparse.Namespace) -> str:
    """Report for the measured link between the ranks; the slowest rank counts."""
    given = [name for name in _LINK_OPTIONS if getattr(arguments, name) is not None]
    if given:
        raise ValueError(
            f"--{given[0]} must not be given under torchrun, which measures the link, got "
            f"{getattr(arguments, given[0])}"
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    wait_for_store()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        workload = _workload(arguments)
        with _progress() as show:
            found = benchmark_ranks(workload, device, show)
        return _text(workload, found, arguments.profile) if dist.get_rank() == 0 else ""
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
        seconds = compute.forward + compute.backward
        of_link = {"rate": link.bytes_per_second, "latency": link.latency}
        Profile(seconds, compute.forward / seconds, **of_link).write(path)
    return "\n".join(
        [
            f"{workload.num_parameters / 1e6:,.1f} M parameters in {len(compute.buckets)} buckets: "
            f"forward {1e3 * compute.forward:,.1f} ms, backward {1e3 * compute.backward:,.1f} ms",
            f"{link.num_ranks} ranks, {link.bytes_per_second * 8e-6:,.0f} Mbit/s, latency "
            f"{1e3 * link.latency:.3g} ms",
            "",
            *aligned([_COLUMNS, *describe(predictions, workload.num_parameters)]),
            _LEGEND,
            "",
            *aligned([_OUTER_COLUMNS, *describe_outer(found, workload.num_parameters)]),
            "",
            advise(predictions),
            *advise_outer(predictions, found.outer_predictions),
        ]
    )


def describe(predictions: Sequence[StepTime], num_parameters: int) -> list[tuple[str, ...]]:
    """Return the rows of the table, the fastest first."""
    by_name = {each.name: each for each in predictions}
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
    by_name = {each.name: each for each in predictions}
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


def describe_outer(found: Measurements, num_parameters: int) -> list[tuple[str, ...]]:
    """Return the rows of the table of outer steps: local steps between them, bytes of each."""
    dense = next(each for each in found.predictions if each.name == DENSE.name)
    local = found.compute.forward + found.compute.backward
    lines: list[tuple[str, ...]] = []
    for algorithm, each in zip(OUTER_STEPS, found.outer_predictions, strict=True):
        sent = each.cost.wire_bytes
        bits = 8 * sent / num_parameters / algorithm.interval
        exposed = each.step - local - each.cost.coding / algorithm.interval
        lines.append((
            each.name,
            f"{algorithm.interval} steps",
            f"{sent / 1e6:,.2f} MB",
            f"{bits:.2g}",
            f"{exposed / each.step:.0%}",
            f"{1e3 * each.step:,.1f} ms",
            f"{dense.step / each.step:.2f}x",
        ))  # fmt: skip
    return lines


def advise_outer(predictions: Sequence[StepTime], outer: Sequence[StepTime]) -> list[str]:
    """Return what to say of outer steps: something where they are faster than any compressor."""
    found, best = choose(predictions), choose(outer)
    if best.step >= (1 - NOISE) * found.step:
        return []
    return [
        f"Outer steps are faster still: gossip.{best.name}() {found.step / best.step:.2f} times as "
        "fast as that. They change the training more than a compressor does: compare the loss."
    ]
