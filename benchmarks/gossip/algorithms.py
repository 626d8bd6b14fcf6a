"""The algorithms of compare.py, by the names in their rows; each is built for a number of ranks."""

from collections.abc import Callable

import torch

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
from pyparallel.gossip.algorithms.base import Algorithm
from pyparallel.gossip.topology import OnePeerExponential, RandomMatching, Ring


def outer_optimizer(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Return SGD with momentum 0.5: DiLoCo's default 0.9 is too much for few outer steps."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.5, nesterov=True)


def node_size(num_ranks: int) -> int:
    return 2 - num_ranks % 2


def hierarchical(num_ranks: int) -> Algorithm:
    size = node_size(num_ranks)
    return Hierarchical(SGP(OnePeerExponential(num_ranks // size), overlap=1), size)


ALGORITHMS: dict[str, Callable[[int], Algorithm]] = {
    "allreduce": lambda n: AllReduce(),
    "sgp": lambda n: SGP(OnePeerExponential(n)),
    "sgp-overlap-1": lambda n: SGP(OnePeerExponential(n), overlap=1),
    "sgp-overlap-4": lambda n: SGP(OnePeerExponential(n), overlap=4),
    "dpsgd": lambda n: DPSGD(Ring(n)),
    "adpsgd": lambda n: ADPSGD(Ring(n)),
    "localsgd": lambda n: LocalSGD(interval=8),
    "slowmo": lambda n: SlowMo(SGP(OnePeerExponential(n)), interval=24, momentum=0.2),
    "diloco": lambda n: DiLoCo(interval=24, outer_optimizer=outer_optimizer),
    "noloco": lambda n: NoLoCo(RandomMatching(n), interval=8),
    "leadersgd": lambda n: LeaderSGD(node_size(n), interval=1, global_interval=4, local_pull=0.1),
    "hierarchical": hierarchical,
}
