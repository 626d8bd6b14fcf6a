"""``python -m benchmarks.gossip.compare [--data digits] [--algorithms sgp dpsgd] [--seeds 0 1 2]``.

Trains on four gloo processes, one thread each, with every algorithm and seed that has no row yet in
``benchmarks/results/gossip-accuracy.csv``, and prints the tables of all rows.
"""

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gossip.table import markdown
from benchmarks.gossip.tasks import TASKS, columns_of
from benchmarks.gossip.tasks import train as train_task
from benchmarks.harness.program import compare
from benchmarks.harness.ranks import run_on_loopback
from benchmarks.harness.rows import RESULTS, Key, Row, RunRows, as_text, shorten
from pyparallel import gossip
from pyparallel.gossip import Algorithm
from pyparallel.gossip.topology import OnePeerExponential, RandomMatching, Ring

FIELDS = [
    "data", "algorithm", "seed", "options", "ranks", "steps", "measure", "score", "worst_rank",
    "consensus_distance", "step_bytes", "step_seconds", "torch", "commit", "losses",
]  # fmt: skip
SECONDS = 3600  # a run's limit


def outer_optimizer(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Return SGD with momentum 0.5: DiLoCo's default 0.9 is too much for few outer steps."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.5, nesterov=True)


def node_size(num_ranks: int) -> int:
    return 2 - num_ranks % 2


def hierarchical(num_ranks: int) -> Algorithm:
    size = node_size(num_ranks)
    return gossip.Hierarchical(gossip.SGP(OnePeerExponential(num_ranks // size), overlap=1), size)


ALGORITHMS: dict[str, Callable[[int], Algorithm]] = {
    "allreduce": lambda n: gossip.AllReduce(),
    "sgp": lambda n: gossip.SGP(OnePeerExponential(n)),
    "sgp-overlap-1": lambda n: gossip.SGP(OnePeerExponential(n), overlap=1),
    "sgp-overlap-4": lambda n: gossip.SGP(OnePeerExponential(n), overlap=4),
    "dpsgd": lambda n: gossip.DPSGD(Ring(n)),
    "adpsgd": lambda n: gossip.ADPSGD(Ring(n)),
    "localsgd": lambda n: gossip.LocalSGD(interval=8),
    "slowmo": lambda n: gossip.SlowMo(gossip.SGP(OnePeerExponential(n)), interval=24, momentum=0.2),
    "diloco": lambda n: gossip.DiLoCo(interval=24, outer_optimizer=outer_optimizer),
    "noloco": lambda n: gossip.NoLoCo(RandomMatching(n), interval=8),
    "leadersgd": lambda n: gossip.LeaderSGD(
        node_size(n), interval=1, global_interval=4, local_pull=0.1
    ),
    "hierarchical": hierarchical,
}


@dataclass(frozen=True)
class Run:
    """One training run; ``steps``: instead of the task's own number."""

    data: str
    algorithm: str
    seed: int
    steps: int | None = None
    ranks: int = 4

    @property
    def key(self) -> Key:
        return self.data, self.algorithm, str(self.seed)


def find_runs(options: argparse.Namespace) -> list[Run]:
    runs = itertools.product(options.seeds, options.data, options.algorithms)
    return [Run(data, name, seed) for seed, data, name in runs]


def perform(run: Run) -> Row:
    ranks = run_on_loopback(run.ranks, SECONDS, train, run)
    return columns_of(run.data, ranks) | {
        "ranks": str(run.ranks),
        "step_seconds": f"{ranks[0]['step_seconds']:.4f}",
        "losses": as_text(shorten([rank["losses"] for rank in ranks])),
    }


def train(rank: int, run: Run) -> Row:
    torch.manual_seed(run.seed)
    task = TASKS[run.data](run.seed, run.steps)
    return train_task(task, lambda: ALGORITHMS[run.algorithm](run.ranks))


if __name__ == "__main__":
    rows = RunRows(RESULTS / "gossip-accuracy.csv", FIELDS, num_keys=3)
    choices = {"data": list(TASKS), "algorithms": list(ALGORITHMS)}
    compare("gossip.compare", __doc__, rows, find_runs, perform, markdown, [0, 1, 2], **choices)
