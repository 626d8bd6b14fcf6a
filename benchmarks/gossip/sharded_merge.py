"""``python -m benchmarks.gossip.sharded_merge [--algorithms ...] [--seeds 0 1 2]``.

What does a round take of a module that FSDP2 has sharded? Two replicas of two shards each, over
gloo's loopback, beside two pairs of plain replicas of a module with half the entries: every rank
sends as many bytes to one other rank. Steps of ``pyparallel.optim.SGD`` without a forward and
backward, in turns; with ``nonfinite="raise"``, and with "allow".
Rows: ``benchmarks/results/sharded-merge.csv``.
"""

import argparse
import statistics
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.gossip.table import sharded_merge
from benchmarks.harness.program import compare, prepare_for_ranks
from benchmarks.harness.ranks import run_on_loopback
from benchmarks.harness.rows import RESULTS, Row, RunRows, machine
from benchmarks.harness.turns import take_turns, timed
from pyparallel import GossipDataParallel
from pyparallel.compression import Int8
from pyparallel.gossip import SGP, Algorithm, DiLoCo
from pyparallel.optim import SGD

FIELDS = [
    "algorithm", "seed", "parameters", "turns", "bytes_ratio", "sharded_ms", "plain_ms", "ratio",
    "machine", "torch", "commit",
]  # fmt: skip
LAYERS, WIDTH, TURNS = 8, 1024, 41

ALGORITHMS: dict[str, Algorithm] = {
    "SGP": SGP(),
    "SGP, Int8": SGP(compressor=Int8()),
    "DiLoCo": DiLoCo(1),
}
ALLOWS = "; allows nan"  # with nonfinite="allow"


class Run(NamedTuple):
    """One measurement."""

    algorithm: str
    seed: int
    turns: int = TURNS

    @property
    def key(self) -> tuple[str, ...]:
        return self.algorithm, str(self.seed)


def find_runs(options: argparse.Namespace) -> Iterator[Run]:
    for seed, algorithm in product(options.seeds, options.algorithms):
        yield Run(algorithm, seed)


def measure(rank: int, run: Run) -> Row:
    torch.manual_seed(run.seed)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    modules = [
        nn.Sequential(*(nn.Linear(WIDTH, rows, bias=False) for _ in range(LAYERS)))
        for rows in (WIDTH, WIDTH // 2)
    ]
    fully_shard(modules[0], mesh=mesh["shard"])
    places: list[dict[str, Any]] = [
        {"mesh": mesh["replicate"]},
        {"process_group": mesh.get_group("replicate")},
    ]
    trainers, steps = [], {}
    for name, module, place in zip(("sharded", "plain"), modules, places, strict=True):
        optimizer = SGD(module.parameters(), lr=1e-3)
        algorithm = ALGORITHMS[run.algorithm.removesuffix(ALLOWS)]
        policy = "allow" if run.algorithm.endswith(ALLOWS) else "raise"
        trainers.append(GossipDataParallel(module, optimizer, algorithm, nonfinite=policy, **place))
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        steps[name] = partial(timed, optimizer.step)
    found = take_turns(steps, run.turns, before=dist.barrier)
    sharded, plain = (trainer.bytes_sent for trainer in trainers)
    return {
        **{name: statistics.median(seconds) for name, seconds in found.items()},
        "ratio": statistics.median(
            a / b for a, b in zip(found["sharded"], found["plain"], strict=True)
        ),
        "bytes_ratio": sharded / plain,
        "parameters": sum(each.numel() for each in modules[0].parameters()),
    }


def perform(run: Run) -> Row:
    found = run_on_loopback(4, 300, measure, run)

    def median(name: str) -> float:
        return statistics.median(each[name] for each in found)

    return {
        "parameters": found[0]["parameters"],
        "turns": run.turns,
        "bytes_ratio": f"{found[0]['bytes_ratio']:.5f}",
        "sharded_ms": f"{1e3 * median('sharded'):.3f}",
        "plain_ms": f"{1e3 * median('plain'):.3f}",
        "ratio": f"{median('ratio'):.4f}",
        "machine": machine(),
    }


if __name__ == "__main__":
    prepare_for_ranks()
    rows = RunRows(RESULTS / "sharded-merge.csv", FIELDS, num_keys=2)
    compare(
        "gossip.sharded_merge", __doc__, rows, find_runs, perform, sharded_merge, range(3),
        algorithms=[*ALGORITHMS, *(f"{each}{ALLOWS}" for each in ALGORITHMS)],
    )  # fmt: skip
