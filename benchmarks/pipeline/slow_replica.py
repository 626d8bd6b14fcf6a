"""``python -m benchmarks.pipeline.slow_replica [--methods ...] [--slowdowns 1 3] [--seeds 0 1 2]``.

How much of their speed do replicas of a pipeline keep if one of them is slow? Four replicas of two
stages over gloo's loopback. A stage has a linear layer of 262,656 parameters and sleeps 20 ms in a
forward and 40 ms in a backward, on the first replica so many times longer: so eight ranks need no
more than two cores. The steps of the other replicas are timed, of four microbatches each.
Rows: ``benchmarks/results/slow-replica.csv``.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

from benchmarks.harness.program import compare, prepare_for_ranks
from benchmarks.harness.ranks import run_on_loopback
from benchmarks.harness.rows import RESULTS, Row, RunRows, machine
from benchmarks.pipeline.models import SleepingLayer
from benchmarks.pipeline.table import slow_replica
from pyparallel import PipelineTrainer, pipeline
from pyparallel.gossip import ADPSGD, OSGP, SGP, AllReduce, LocalSGD
from pyparallel.gossip.topology import Complete

FIELDS = [
    "method",
    "slowdown",
    "seed",
    "ranks",
    "steps",
    "ms_per_step",
    "machine",
    "torch",
    "commit",
]
REPLICAS, STAGES, MICROBATCHES, STEPS, WARM_UP = 4, 2, 4, 20, 4
FORWARD, BACKWARD = 0.02, 0.04  # seconds of a microbatch on a stage
WIDTH = 512
SECONDS = 300  # a run's limit

METHODS: dict[str, tuple[pipeline.Schedule, Any]] = {
    "1F1B, AllReduce": (pipeline.OneForwardOneBackward(), AllReduce()),
    "PipeOptim, SGP": (pipeline.PipeOptim(), SGP(overlap=1)),
    "PipeOptim, OSGP": (pipeline.PipeOptim(), OSGP(delay=4)),
    "PipeOptim, LocalSGD": (pipeline.PipeOptim(), LocalSGD(40)),
    "PipeOptim, ADPSGD": (pipeline.PipeOptim(), ADPSGD(Complete)),
}


class Run(NamedTuple):
    """One run by a method, beside a first replica that is so many times slower."""

    method: str
    slowdown: str
    seed: int
    steps: int = STEPS

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(map(str, self[:-1]))


def find_runs(options: argparse.Namespace) -> Iterator[Run]:
    for seed, method, slowdown in product(options.seeds, options.methods, options.slowdowns):
        yield Run(method, slowdown, seed)


def train(rank: int, run: Run) -> float:
    """Return the seconds of a step of this rank's replica, without waiting for its end."""
    torch.manual_seed(run.seed)
    mesh = init_device_mesh("cpu", (REPLICAS, STAGES), mesh_dim_names=("replicate", "stage"))
    slow = float(run.slowdown) if mesh.get_local_rank("replicate") == 0 else 1.0
    layers: list[nn.Module] = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), SleepingLayer(slow * FORWARD, slow * BACKWARD))
        for _ in range(STAGES)
    ]
    schedule, algorithm = METHODS[run.method]
    trainer = PipelineTrainer(
        layers, mse_loss, partial(torch.optim.SGD, lr=1e-3), schedule, mesh=mesh,
        replicas=algorithm, num_microbatches=MICROBATCHES, split=[1],
    )  # fmt: skip
    inputs = torch.randn(MICROBATCHES, WIDTH)
    begin = 0.0
    for step in range(run.steps):
        if step == WARM_UP:
            dist.barrier()
            begin = time.perf_counter()
        trainer.step(inputs, target=inputs)
    seconds = (time.perf_counter() - begin) / (run.steps - WARM_UP)
    trainer.flush()
    return seconds


def perform(run: Run) -> Row:
    found = run_on_loopback(REPLICAS * STAGES, SECONDS, train, run)
    seconds = statistics.median(found[STAGES:])  # of the replicas after the first
    sizes = {"ranks": len(found), "steps": run.steps, "machine": machine()}
    return sizes | {"ms_per_step": f"{1e3 * seconds:.2f}"}


if __name__ == "__main__":
    prepare_for_ranks()
    rows = RunRows(RESULTS / "slow-replica.csv", FIELDS, num_keys=3)
    choices = {"methods": list(METHODS), "slowdowns": ["1", "3"]}
    compare(
        "pipeline.slow_replica",
        __doc__,
        rows,
        find_runs,
        perform,
        slow_replica,
        range(3),
        **choices,
    )
