"""The ranks of the examples: joining the group that torchrun started, and gathering results."""

import argparse
import functools
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pyparallel.comm import wait_for_store


def make_parser(description: str, **lengths: int) -> argparse.ArgumentParser:
    """Return a parser of --seed, --out, --tensorboard and the given numbers, with defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, each in lengths.items():
        parser.add_argument(f"--{name}", type=positive, default=each, help="default: %(default)s")
    if int(os.environ.get("RANK", "0")):  # rank 0 prints help or an error; torchrun then ends all
        parser.print_help = lambda: None
        parser.error = lambda message: time.sleep(60) or sys.exit(2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tensorboard", metavar="DIR", help="write every rank's metrics there")
    parser.add_argument("--out", type=Path, default=Path("runs") / Path(sys.argv[0]).stem)
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text}")
    return int(text)


def following(choice: str, choices: Iterable[str]) -> str:
    """Return the choice after this one, to try next."""
    names = list(choices)
    return names[(names.index(choice) + 1) % len(names)]


def join_ranks(seed: int) -> torch.device:
    """Join the group of all ranks: NCCL with a GPU for each, or gloo on CPUs."""
    if "RANK" not in os.environ:
        script = sys.argv[0]
        sys.exit(f"start it by: torchrun --standalone --nproc-per-node 4 {script}")
    torch.manual_seed(seed)
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))  # Ctrl-C: no traceback of each rank
    try:
        wait_for_store()
    except ConnectionError as error:
        sys.exit(str(error))
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")  # by tensor cores, with inputs rounded to TF32
    return device


def log_metrics(folder: str | None, run: str, metrics: dict[str, float], step: int) -> None:
    """Write this rank's metrics of a step for TensorBoard; without a folder, nothing."""
    if folder is not None:
        writer = writer_of(f"{folder}/{run}/rank-{dist.get_rank()}")
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()


@functools.cache
def writer_of(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        sys.exit("--tensorboard needs a package that is missing: pip install tensorboard")
    return SummaryWriter(folder)


def waiting(spans: list[Any]) -> str:
    """Return the percentage of the time of these spans, over all ranks, in which none runs."""
    busy = sum(span.end - span.begin for span in spans)
    idle = 1 - busy / (spans[-1].end - spans[0].begin)
    return f"{sum(gather(idle)) / dist.get_world_size():.0%}"


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
