"""Gossip training: ranks average only with their neighbors.

    make train
    torchrun --standalone --nproc-per-node 4 examples/train_gossip.py --topology ring
    torchrun --standalone --nproc-per-node 4 examples/train_gossip.py --algorithm osgp
    torchrun --standalone --nproc-per-node 4 examples/train_gossip.py --slow-rank 2:3
    torchrun --standalone --nproc-per-node 4 examples/train_gossip.py --data text

No download is needed: a convolutional net classifies scikit-learn's 1,797 digits of 8 x 8 pixels,
or a small transformer models the bytes of Python's standard library. The training loops are in
gossip_digits.py and gossip_text.py. Rank 0 prints a table and writes gossip.png (loss and consensus
distance), gossip.pt (the consensus model, which loads into the bare module) and results.json to
--out.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from gossip_digits import Digits
from gossip_report import report
from gossip_text import Text
from launch import join_ranks, positive
from pyparallel import GossipDataParallel, topology
from pyparallel.gossip import (
    ADPSGD,
    DPSGD,
    SGP,
    AllReduce,
    DiLoCo,
    Hierarchical,
    LeaderSGD,
    LocalSGD,
    NoLoCo,
    SlowMo,
)

TOPOLOGIES = {
    "ring": topology.Ring,
    "one-peer-exponential": topology.OnePeerExponential,
    "directed-exponential": topology.DirectedExponential,
    "complete": topology.Complete,
    "base-graph": topology.BaseGraph,
    "random-matching": topology.RandomMatching,
    "torus": topology.Torus,
    "star": topology.Star,
}


def outer_optimizer(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Return SGD with momentum 0.5: DiLoCo's default 0.9 is too much for few outer steps."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.5, nesterov=True)


ALGORITHMS = {  # each creates an algorithm from a topology
    "sgp": SGP,
    "osgp": lambda graph: SGP(graph, overlap=1),
    "osgp4": lambda graph: SGP(graph, overlap=4),
    "dpsgd": lambda graph: DPSGD(topology.Ring(graph.num_ranks)),
    "adpsgd": lambda graph: ADPSGD(topology.Ring(graph.num_ranks)),
    "localsgd": lambda graph: LocalSGD(interval=8),
    "slowmo": lambda graph: SlowMo(SGP(graph), interval=24, momentum=0.2),
    "diloco": lambda graph: DiLoCo(interval=24, outer_optimizer=outer_optimizer),
    "leadersgd": lambda graph: LeaderSGD(node_size(graph), interval=1, global_interval=4),
    "noloco": lambda graph: NoLoCo(topology.RandomMatching(graph.num_ranks), interval=8),
    "hierarchical": lambda graph: Hierarchical(
        SGP(type(graph)(graph.num_ranks // node_size(graph)), overlap=1), node_size(graph)
    ),
    "allreduce": lambda graph: AllReduce(),
}
DATA = {"digits": Digits, "text": Text}


def node_size(graph: topology.Topology) -> int:
    """Return 2 ranks per node if the number of ranks is even, else 1."""
    return 2 - graph.num_ranks % 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=list(DATA), default="digits")
    parser.add_argument("--algorithm", choices=list(ALGORITHMS), default="sgp")
    parser.add_argument("--topology", choices=list(TOPOLOGIES), default="one-peer-exponential")
    parser.add_argument("--epochs", type=positive, help="of digits: 40")
    parser.add_argument("--steps", type=positive, help="per rank, instead of epochs; text: 3000")
    parser.add_argument("--batch-size", type=positive, help="per rank; digits: 16, text: 4")
    parser.add_argument("--lr", type=float, help="digits: 0.05, text: 0.024")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--slow-rank", metavar="R:FACTOR", type=parse_slow_rank, help="make rank R a straggler"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gossip"))
    options = parser.parse_args()
    if options.epochs and (options.steps or options.data == "text"):
        parser.error(
            "--epochs must be used with --data digits, without --steps; limit text by --steps"
        )
    return options


def parse_slow_rank(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition(":")
    try:
        parsed = int(rank), float(factor)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be R:FACTOR, for example 2:3, got {text}") from None
    if parsed[0] < 0 or parsed[1] < 1:
        raise argparse.ArgumentTypeError(f"must be R >= 0 and FACTOR >= 1, got {text}")
    return parsed


def straggle(options: argparse.Namespace) -> Callable[[float], None]:
    """Return a function that sleeps on the slow rank, so that steps take FACTOR times as long."""
    rank, factor = options.slow_rank or (None, 1.0)
    if rank != dist.get_rank():
        return lambda begin: None
    return lambda begin: time.sleep((factor - 1) * (time.perf_counter() - begin))


def main() -> None:
    options = parse_arguments()
    device = join_ranks()
    torch.manual_seed(options.seed)
    values = {name: getattr(options, name) for name in ("epochs", "steps", "batch_size", "lr")}
    settings = {name: value for name, value in values.items() if value is not None}
    task = DATA[options.data](device, options.seed, **settings)
    model, optimizer = task.build()
    graph = TOPOLOGIES[options.topology](dist.get_world_size())
    model = GossipDataParallel(model, optimizer, ALGORITHMS[options.algorithm](graph))
    history = task.train(model, optimizer, straggle(options))
    report(model, task, history, options.seed, options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
