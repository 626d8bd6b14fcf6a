"""Overlap of a gossip round's communication with computation, on one machine.

The computation is either matrix products, as in a forward pass, or ``mix_``, which needs the
memory's bandwidth as the transfer does. The group is one of those that trainers make.

``python -m benchmarks.ops.overlap --ranks 1`` lets one NCCL rank send to itself: streams, waiting
and the contention of NCCL's kernel with ours are real, the other rank is not. ``--ranks 2`` needs
two GPUs, or one and NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1 (the processes then alternate).
Without a GPU two gloo ranks on the CPU test the script, not the speed. None measures a real link.
"""

import argparse
import ctypes
import os
import statistics
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.harness.link import loopback
from benchmarks.harness.measure import FIELDS, NUM_TRIES, time_once
from benchmarks.harness.program import make_parser
from benchmarks.harness.rows import print_rows, record, stamp
from benchmarks.harness.turns import take_turns
from benchmarks.ops.held_sms import carved_out
from pyparallel.comm.process_groups import create_group
from pyparallel.ops import mix_

TIMEOUT = timedelta(seconds=60)
COMMUNICATION = "communication"
CTAS = 16  # the most thread blocks of a trainer's group, of an SM each


def start_exchange(outgoing: torch.Tensor, incoming: torch.Tensor, group) -> list[dist.Work]:
    """Start a send to the next rank and a receive from the previous one, as in a gossip round."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    send = dist.P2POp(dist.isend, outgoing, (rank + 1) % ranks, group)
    receive = dist.P2POp(dist.irecv, incoming, (rank - 1) % ranks, group)
    return dist.batch_isend_irecv([send, receive])


def make_group(max_ctas: int | None) -> dist.ProcessGroup:
    """Return a group as trainers make it, or one whose kernels have at most so many blocks."""
    if max_ctas is None:
        return create_group(range(dist.get_world_size()), None)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = max_ctas
    return dist.new_group(pg_options=options)


def make_steps(device: str, numel: int, group, carved: int) -> dict[str, Callable[[], None]]:
    """Return the exchange, and each computation alone and during an exchange.

    Matrix products also leave ``carved`` SMs to the exchange.
    """
    outgoing, incoming, z, message = (torch.randn(numel, device=device) for _ in range(4))
    kept = torch.tensor(0.5, dtype=torch.float64, device=device)
    masses = kept.reshape(1).clone()

    def communicate() -> None:
        for work in start_exchange(outgoing, incoming, group):
            work.wait()

    def mix() -> None:
        for _ in range(4):
            mix_(z, kept.clone(), [message], masses)

    width = 4096 if device == "cuda" else 64
    left, right = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))

    def multiply() -> None:
        for _ in range(8):
            torch.mm(left, right)

    def multiply_beside() -> None:
        with carved_out(carved):
            multiply()

    def during_exchange(compute: Callable[[], None]) -> None:
        works = start_exchange(outgoing, incoming, group)
        compute()
        for work in works:
            work.wait()

    computations = {"mix_ four times": mix, "eight matrix products": multiply}
    both = {
        f"{name}, during it": partial(during_exchange, compute)
        for name, compute in computations.items()
    }
    both["eight matrix products, during it, carved out"] = partial(during_exchange, multiply_beside)
    return {COMMUNICATION: communicate, **computations, **both}


def measure(device: str, numel: int, turns: int, max_ctas: int | None) -> dict[str, float]:
    """Return the median seconds of each; the ranks start each one together."""
    steps = make_steps(device, numel, make_group(max_ctas), max_ctas or CTAS)
    for step in steps.values():  # connects, and loads kernels
        dist.barrier()
        step()
    tries = NUM_TRIES if dist.get_world_size() == 1 else 1  # others would not try again
    runs = {name: partial(time_once, step, device, tries=tries) for name, step in steps.items()}
    times = take_turns(runs, turns, warm_up=2, before=dist.barrier)
    return {name: statistics.median(each.device for each in own) for name, own in times.items()}


def run_rank(rank: int, port: int, options: argparse.Namespace) -> None:
    on_gpu, version = options.device == "cuda", ""
    if on_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        version = " " + ".".join(map(str, nccl_versions()[0]))
    store = f"tcp://127.0.0.1:{port}"
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(
        backend, init_method=store, rank=rank, world_size=options.ranks, timeout=TIMEOUT
    )
    if on_gpu and rank == 0:
        print(f"NCCL: torch was compiled with {torch.cuda.nccl.version()}, "
              f"loaded: {nccl_versions()}")  # fmt: skip
    case = f"{options.ranks} rank{'s' * (options.ranks > 1)}, {backend}{version}"
    for max_ctas in options.max_ctas or [None]:
        seconds = measure(options.device, options.numel, options.turns, max_ctas)
        if rank == 0:
            name = case if max_ctas is None else f"{case}, {max_ctas} blocks"
            write_rows(seconds, name, options)
    dist.destroy_process_group()


def write_rows(seconds: dict[str, float], case: str, options: argparse.Namespace) -> None:
    common = {"op": "overlap", "case": case, "device": options.device, **stamp()}
    common |= {"numel": options.numel, "threads": torch.get_num_threads()}
    rows = [
        {**common, "provider": name, "median_ms": f"{value * 1e3:.4f}"}
        for name, value in seconds.items()
    ]
    for row in rows:
        alone, together, _ = row["provider"].partition(", during it")
        if together:
            ratio = (seconds[COMMUNICATION] + seconds[alone]) / seconds[row["provider"]]
            row["speedup_of_ours"] = f"{ratio:.2f}"
    if options.out:
        record([rows], options.out, FIELDS, key=("op", "case"))
    else:
        print_rows(rows)


def nccl_versions() -> list[tuple[int, ...]]:
    """Return the versions of the loaded NCCL libraries; the first one's functions are called."""
    mapped = Path("/proc/self/maps").read_text().split()
    paths = dict.fromkeys(path for path in mapped if "libnccl" in Path(path).name)
    # What LD_PRELOAD loads comes first; torch's own library is then loaded but not called.
    preloaded = [os.path.realpath(path) for path in os.environ.get("LD_PRELOAD", "").split(":")]
    found = []
    for path in sorted(paths, key=lambda path: path not in preloaded):
        code = ctypes.c_int()
        ctypes.CDLL(path).ncclGetVersion(ctypes.byref(code))
        found.append((code.value // 10000, code.value // 100 % 100, code.value % 100))
    return found or [torch.cuda.nccl.version()]


def main() -> None:
    parser = make_parser("ops.overlap", __doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--numel", type=int, default=2**26, help="float32 numbers of a message")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument(
        "--max-ctas", nargs="+", type=int, help="most thread blocks of NCCL's kernels"
    )
    options = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # not supported with several ranks on one GPU
    with loopback() as place:
        mp.spawn(run_rank, (place.port, options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
