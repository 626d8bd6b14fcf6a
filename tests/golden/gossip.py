"""Jobs of GossipDataParallel: every algorithm, and the states of compressed messages."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import networkx as nx
import torch
import torch.distributed as dist

from pyparallel import GossipDataParallel, topology
from pyparallel.compression import Cast, Chain, Int8, PerParameter, PowerSGD, RandomK, TopK
from pyparallel.gossip import (
    ADPSGD,
    DPSGD,
    SGP,
    AllReduce,
    DiLoCo,
    GossipState,
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
    RandomMatching,
    Ring,
    Star,
)
from tests.golden.job import Job, Result, any_rank, listed
from tests.golden.models import Small, adam, batch, sgd, squared_error

NUM_RANKS = 4
TWO_BUCKETS = 36 / 2**20  # MiB: the matrix in one, the vectors in the other


class GossipRun:
    """A training loop with GossipDataParallel."""

    def __init__(
        self, algorithm: Any, optimizer_fn: Callable[[Any], Any] = sgd, bucket_cap_mb: float = 25
    ) -> None:
        model = Small()
        self.optimizer = optimizer_fn(model.parameters())
        self.model = GossipDataParallel(
            model, self.optimizer, algorithm, bucket_cap_mb=bucket_cap_mb
        )
        self.losses: list[float] = []

    def train(self, steps: Sequence[int]) -> None:
        for step in steps:
            inputs, targets = batch(step)
            self.optimizer.zero_grad()
            loss = squared_error(self.model(inputs), targets)
            self.model.record_loss(loss)
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())

    def pause(self) -> None:
        pass

    def save(self) -> Any:
        return {
            "gossip": GossipState(self.model, self.optimizer).state_dict(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "algorithm": self.model.algorithm_state_dict(),
        }

    def load(self, saved: Any, way: int) -> None:
        if way == 0:
            GossipState(self.model, self.optimizer).load_state_dict(saved["gossip"])
        else:
            self.load_others(saved)
            self.model.load_algorithm_state_dict(saved["algorithm"])

    def load_others(self, saved: Any) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def finish(self) -> Result:
        self.model.flush()
        found = {"losses": self.losses, "weight": self.model.push_sum_weight.item()}
        found |= listed(self.model.state_dict())
        self.model.close()
        return found


class LossRecordingRun(GossipRun):
    """Training with recorded losses: even ranks lead, by many losses of 0, if the mean is right."""

    def train(self, steps: Sequence[int]) -> None:
        is_odd = dist.get_rank() % 2
        for step in steps:
            is_last = step % 3 == 2
            for _ in range(8 * (is_odd == is_last)):
                self.model.record_loss(0.25 * is_odd)
            super().train([step])


class AsynchronousRun(GossipRun):
    """Training until a reply is in flight; later steps are not deterministic."""

    def train(self, steps: Sequence[int]) -> None:
        is_first = 0 in steps
        while is_first and not any_rank(bool(self.model.algorithm_state_dict()["answer"])):
            super().train([len(self.losses)])


def every_topology() -> topology.TimeVarying:
    """Return all topologies in turn: the state compares the repr of each."""
    matrix = torch.full((NUM_RANKS, NUM_RANKS), 1 / NUM_RANKS, dtype=torch.float64).numpy()
    return topology.TimeVarying(
        [
            topology.OnePeerExponential(NUM_RANKS),
            topology.BaseGraph(NUM_RANKS),
            topology.Ring(NUM_RANKS),
            topology.Torus(NUM_RANKS),
            topology.Hypercube(NUM_RANKS),
            topology.Complete(NUM_RANKS),
            topology.DirectedExponential(NUM_RANKS),
            topology.DirectedLinear(NUM_RANKS),
            topology.BipartiteExponential(NUM_RANKS),
            topology.RandomMatching(NUM_RANKS, period=2),
            topology.HierarchicalTopology(NUM_RANKS, 2),
            topology.Lazy(topology.Ring(NUM_RANKS), 0.5),
            topology.Phases([(topology.Ring(NUM_RANKS), 2), (topology.Complete(NUM_RANKS), 2)]),
            topology.FromGraph(nx.cycle_graph(NUM_RANKS)),
            topology.FromMatrix(matrix),
            topology.Star(NUM_RANKS),
        ]
    )


def outer_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.0625)


def _job(
    make: Callable[[int], Any], *, remembers: bool = True, exact: bool = True, **options: Any
) -> Job:
    return Job(
        lambda: GossipRun(make(dist.get_world_size()), **options),
        remembers=remembers,
        exact=exact,
        ways=2,
    )


MIXED = {
    "first.*": PowerSGD(1, min_ratio=0),
    "*.scale": RandomK(0.5),
    "*": Chain(TopK(0.5), Int8()),
}

JOBS = {
    "sgp": _job(lambda n: SGP(OnePeerExponential(n))),
    "sgp-adam": _job(lambda n: SGP(OnePeerExponential(n)), optimizer_fn=adam, exact=False),
    "sgp-star": _job(lambda n: SGP(Star(n))),
    # Complete rounds were messages when it was saved and are all-reduces now, of other bits.
    "sgp-every-topology": Job(lambda: GossipRun(SGP(every_topology())), ways=2, rounded=True),
    "osgp": _job(lambda n: SGP(OnePeerExponential(n), overlap=1), bucket_cap_mb=TWO_BUCKETS),
    "osgp-adam": _job(
        lambda n: SGP(OnePeerExponential(n), overlap=1), optimizer_fn=adam, exact=False
    ),
    "osgp-3": _job(lambda n: SGP(BaseGraph(n), overlap=3)),
    "dpsgd": _job(lambda n: DPSGD(Ring(n)), remembers=False),
    "dpsgd-matching": _job(lambda n: DPSGD(RandomMatching(n, seed=1))),
    "sgp-int8": _job(
        lambda n: SGP(OnePeerExponential(n), compressor=Int8(seed=1)), bucket_cap_mb=TWO_BUCKETS
    ),
    "sgp-cast": _job(lambda n: SGP(Ring(n), compressor=Cast())),
    "sgp-mixed": _job(lambda n: SGP(Lazy(Ring(n), 0.25), compressor=PerParameter(MIXED))),
    "osgp-int8": _job(lambda n: SGP(RandomMatching(n), overlap=1, compressor=Int8())),
    "osgp-3-top-k": _job(lambda n: SGP(Lazy(Star(n), 0.2), overlap=3, compressor=TopK(0.2))),
    "localsgd": _job(lambda n: LocalSGD(interval=3)),
    "slowmo": _job(
        lambda n: SlowMo(SGP(OnePeerExponential(n), overlap=1), interval=4, momentum=0.4)
    ),
    "slowmo-alone": _job(lambda n: SlowMo(None, interval=3)),
    "diloco": _job(lambda n: DiLoCo(interval=3)),
    "diloco-adam": _job(lambda n: DiLoCo(interval=2, outer_optimizer=outer_adam), exact=False),
    "noloco": _job(lambda n: NoLoCo(RandomMatching(n), interval=2)),
    "leadersgd": _job(lambda n: LeaderSGD(2, 2, 4, local_pull=0.1)),
    "leadersgd-telling": Job(partial(LossRecordingRun, LeaderSGD(2, 3, 3, local_pull=0.1)), ways=2),
    "hierarchical": _job(lambda n: Hierarchical(SGP(OnePeerExponential(n // 2), overlap=1), 2)),
    "hierarchical-star": _job(lambda n: Hierarchical(SGP(Star(n // 2), overlap=2), 2)),
    "hierarchical-slowmo": _job(lambda n: Hierarchical(SlowMo(SGP(Ring(n // 2)), interval=3), 2)),
    "allreduce": _job(lambda n: AllReduce(), remembers=False),
    "adpsgd": Job(partial(AsynchronousRun, ADPSGD(Complete(NUM_RANKS))), repeats=False, ways=2),
}

# The same, saved with checksums.
OF_FORMAT_2 = [
    "osgp-adam",
    "sgp-mixed",
    "slowmo",
    "diloco-adam",
    "noloco",
    "leadersgd",
    "hierarchical-star",
    "allreduce",
]
JOBS |= {f"format-2-{name}": JOBS[name] for name in OF_FORMAT_2}
