"""Every algorithm, for tests of all: each row creates one for an even number of ranks."""

import torch

from pyparallel.compression import ErrorFeedback, Int8, TopK
from pyparallel.gossip import (
    ADPSGD,
    DPSGD,
    EASGD,
    OSGP,
    SGP,
    AllReduce,
    AsynchronousLeaderSGD,
    DiLoCo,
    Hierarchical,
    LeaderSGD,
    LocalSGD,
    NoLoCo,
    SlowMo,
)
from pyparallel.gossip.topology import (
    BaseGraph,
    Complete,
    Lazy,
    OnePeerExponential,
    Phases,
    RandomMatching,
    Ring,
    Star,
)


def outer_adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


EVERY_ALGORITHM = {
    "sgp": lambda n: SGP(OnePeerExponential(n)),
    "sgp-star": lambda n: SGP(Star(n)),
    "sgp-overlap-1": lambda n: SGP(OnePeerExponential(n), overlap=1),
    "sgp-overlap-3": lambda n: SGP(BaseGraph(n), overlap=3),
    "sgp-phases": lambda n: SGP(Phases([(Star(n), 2), (Complete(n), None)]), overlap=1),
    "osgp": lambda n: OSGP(OnePeerExponential(n)),
    "osgp-3": lambda n: OSGP(Star(n), 3),
    "osgp-biased": lambda n: OSGP(Ring(n), biased=True),
    "dpsgd": lambda n: DPSGD(Ring(n)),
    "sgp-int8": lambda n: SGP(OnePeerExponential(n), compressor=Int8(seed=1)),
    "sgp-overlap-3-top-k": lambda n: SGP(Lazy(Star(n), 0.2), overlap=3, compressor=TopK(0.2)),
    "localsgd": lambda n: LocalSGD(interval=3),
    "slowmo": lambda n: SlowMo(SGP(OnePeerExponential(n), overlap=1), interval=4, momentum=0.4),
    "diloco": lambda n: DiLoCo(interval=3),
    "diloco-adam": lambda n: DiLoCo(interval=2, outer_optimizer=outer_adam),
    "diloco-streamed": lambda n: DiLoCo(
        4, fragments=2, delay=3, compressor=ErrorFeedback(TopK(0.2))
    ),
    "noloco": lambda n: NoLoCo(RandomMatching(n), interval=2),
    "leadersgd": lambda n: LeaderSGD(ranks_per_node=2, interval=2, global_interval=4),
    "leadersgd-code": lambda n: LeaderSGD(2, interval=2, global_interval=4, local_pull=0.1),
    "leadersgd-asynchronous": lambda n: AsynchronousLeaderSGD(2, interval=2, global_interval=4),
    "easgd": lambda n: EASGD(interval=2),
    "hierarchical": lambda n: Hierarchical(SGP(OnePeerExponential(n // 2), overlap=1), 2),
    "hierarchical-star": lambda n: Hierarchical(SGP(Star(n // 2), overlap=2), 2),
    "hierarchical-osgp": lambda n: Hierarchical(OSGP(OnePeerExponential(n // 2)), 2),
    "adpsgd": lambda n: ADPSGD(Complete(n)),
    "allreduce": lambda n: AllReduce(),
}

# The order of exchanges, or when leaders are chosen, depends on timing: no two runs are equal.
NONDETERMINISTIC = {"adpsgd", "leadersgd-asynchronous"}
DETERMINISTIC = [name for name in EVERY_ALGORITHM if name not in NONDETERMINISTIC]
# One of each kind of average, order and message: what fast tests take.
COVERING = [
    "sgp-star", "sgp-overlap-3", "osgp-3", "sgp-overlap-3-top-k", "slowmo", "diloco-streamed",
    "noloco", "leadersgd", "leadersgd-code", "hierarchical-star", "allreduce",
]  # fmt: skip
# Of these a few, for what is decided before an average is taken.
FEW = ["sgp-star", "slowmo", "leadersgd", "hierarchical-star", "allreduce"]
# join() is an error with unequal numbers of batches, or at all: a rank without batches cannot
# contribute its shard, or calls flush() instead.
NEEDS_EQUAL_BATCHES = {"hierarchical", "hierarchical-star", "hierarchical-osgp"}
NEEDS_EQUAL_BATCHES |= {"leadersgd-asynchronous"}
