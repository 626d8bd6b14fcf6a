"""What a change costs: small measurements of this checkout and of another one, in turns.

``python -m benchmarks.checkouts ../before`` runs both, one after the other in an order that
alternates, and prints the ratio of the medians and the least and the greatest ratio of a turn. All
but the last cases are of one gloo rank with a thread and a core: two ranks wait for each other, and
their times differ by a half from turn to turn. The other checkout needs its compiled library, and
the public names used here. Rows go to ``benchmarks/results/checkouts-<machine>.csv``; the first of
each pair is the other checkout's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyparallel import (
    GossipDataParallel,
    PipelineTrainer,
    SubnetTrainer,
    compression,
    gossip,
    ops,
    optim,
    pipeline,
    subnets,
    topology,
)

ROOT = Path(__file__).resolve().parents[1]
FIELDS = ["case", "unit", "before", "after", "ratio", "least", "greatest", "turns", "torch"]
FIELDS += ["commit_before", "commit"]
SECONDS = 300  # for one run of all cases
Cases = Iterator[tuple[str, str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="another checkout")
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for turn in range(options.turns):
        pair = [options.before.resolve(), ROOT]
        results = {path: run(path) for path in (pair if turn % 2 else pair[::-1])}
        for case, (unit, value) in results[pair[0]].items():
            found.setdefault((case, unit), []).append((value, results[ROOT][case][1]))
        print(f"turn {turn + 1} of {options.turns}", flush=True)
    write(found, options.before)


def write(found: dict[tuple[str, str], list[tuple[float, float]]], before: Path) -> None:
    # Not found where a rank of the other checkout runs this file.
    from benchmarks.harness.rows import RESULTS, commit, machine, record

    command = ["git", "-C", str(before), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows: list[dict[str, object]] = []
    for (case, unit), pairs in found.items():
        medians = [statistics.median(values) for values in zip(*pairs, strict=True)]
        ratios = [after / first for first, after in pairs]
        numbers = [*medians, medians[1] / medians[0], min(ratios), max(ratios)]
        texts = [f"{number:.4g}" for number in numbers]
        commits = [done.stdout.strip(), commit()]
        cells = [case, unit, *texts, len(pairs), torch.__version__, *commits]
        rows.append(dict(zip(FIELDS, cells, strict=True)))
    record([rows], RESULTS / f"checkouts-{machine()}.csv", FIELDS)


def run(checkout: Path) -> dict[str, tuple[str, float]]:
    """Return unit and value of each case, measured in new processes."""
    return run_ranks(checkout, 1) | run_ranks(checkout, 2)


def run_ranks(checkout: Path, num_ranks: int) -> dict[str, tuple[str, float]]:
    from benchmarks.harness.link import free_port

    place = {"PYTHONPATH": str(checkout), "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    place |= {"WORLD_SIZE": str(num_ranks)}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--measure"], cwd=checkout, stdout=subprocess.PIPE,
            env={**os.environ, **place, "RANK": str(rank)}, text=True,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    texts = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank of {checkout} failed")
    return {case: (unit, value) for case, unit, value in json.loads(texts[0].splitlines()[-1])}


def measure() -> None:
    """Measure the cases of a rank, or of two; print them as JSON."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    dist.init_process_group("gloo")
    alone = dist.get_world_size() == 1
    cases = [*measure_ops(), *measure_steps()] if alone else [*measure_overlap()]
    print(json.dumps(cases), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def timed(step: Callable[[], object], times: int, num_blocks: int = 40) -> float:
    """Return the seconds of a step, the least of some blocks after one of warm-up."""
    blocks = []
    for _ in range(num_blocks + 1):
        begin = time.perf_counter()
        for _ in range(times):
            step()
        blocks.append((time.perf_counter() - begin) / times)
    return min(blocks[1:])


def measure_ops() -> Cases:
    """Calls of ops on 64 numbers."""
    x, y, m, v = (torch.rand(64) for _ in range(4))
    weight, masses = torch.ones((), dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    momentum = {
        "lr": 0.1,
        "momentum": 0.9,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
    }
    adam = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "step": 3, "horizon": 1}
    calls: dict[str, Callable[[], object]] = {
        "mix_": lambda: ops.mix_(x, weight.fill_(1), [y], masses),
        "sgd_step_": lambda: ops.sgd_step_(x, y, m, **momentum),
        "predict_adam": lambda: ops.predict_adam(x, m, v, **adam),
        "quantize": lambda: ops.quantize(x, bits=8),
        "top_k": lambda: ops.top_k(x, 4),
    }
    for name, call in calls.items():
        yield f"call of {name}", "us", 1e6 * timed(call, 300)


def build(width: int = 8) -> nn.Sequential:
    """Return a module of three layers with equal parameters on both ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def training_step(model: Callable[..., Any], optimizer: Any, width: int = 8) -> Callable[[], None]:
    inputs = torch.rand(4, width)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def time_gossip(algorithm: gossip.Algorithm, kind: Any, width: int, *arguments: int) -> float:
    """Return the seconds of a step of gossip, timed with these arguments."""
    module = build(width)
    optimizer = kind(module.parameters(), lr=0.01)
    trainer = GossipDataParallel(module, optimizer, algorithm)
    seconds = timed(training_step(trainer, optimizer, width), *arguments)
    trainer.flush()
    trainer.close()
    return seconds


def measure_steps() -> Cases:
    """Steps of 144 parameters, where all is overhead."""
    kinds = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
    kinds |= {"fused SGD": optim.SGD, "fused AdamW": optim.AdamW}
    for name, kind in kinds.items():
        seconds = time_gossip(gossip.SGP(topology.Ring(1)), kind, 8, 20)
        yield f"step of gossip, {name}", "us", 1e6 * seconds
    inputs = torch.rand(8, 8)
    every = (pipeline.OneForwardOneBackward(), pipeline.PipeDream2BW(), pipeline.PipeOptim())
    for schedule in every:
        trainer = PipelineTrainer(
            list(build()), nn.MSELoss(), sgd, schedule, num_microbatches=4, num_stages=2
        )
        seconds = timed(partial(trainer.step, inputs, inputs), 10)
        yield f"step of 2 stages, {type(schedule).__name__}", "us", 1e6 * seconds
        trainer.flush()
        trainer.close()
    subnet = SubnetTrainer(build(), sgd, subnets.Partition(), interval=5)
    yield "step of a subnet", "us", 1e6 * timed(training_step(subnet, subnet.optimizer), 20)
    subnet.close()
    compressors: list[Any] = [compression.Int8(), compression.PowerSGD(2), compression.TopK(0.1)]
    for each in compressors:
        module = build()
        ddp = DistributedDataParallel(module)
        compression.compress_ddp(ddp, compression.ErrorFeedback(each))
        seconds = timed(training_step(ddp, sgd(module.parameters())), 20)
        yield f"step of DDP with a hook, {type(each).__name__}", "us", 1e6 * seconds


def measure_overlap() -> Cases:
    """Steps of gossip on four million numbers, whose messages travel during the backward pass."""
    for algorithm in (gossip.SGP(topology.Ring(2), overlap=1), gossip.OSGP(topology.Ring(2))):
        seconds = time_gossip(algorithm, optim.SGD, 1400, 5, 20)
        yield f"step with hidden messages, {type(algorithm).__name__}", "ms", 1e3 * seconds


if __name__ == "__main__":
    measure() if sys.argv[1:] == ["--measure"] else main()
