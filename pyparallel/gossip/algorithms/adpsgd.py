"""Asynchronous decentralized parallel SGD: pairwise averaging that does not block training."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import Flags, FlatBuckets, NeighborExchange, barrier_of, store_of, timeout_of
from ..topology import Topology
from ..topology.base import check_topology
from .base import Algorithm
from .pairwise import PairwiseAverager
from .partners import Partners


@dataclass(frozen=True)
class ADPSGD(Algorithm):
    """AD-PSGD (Lian et al., ICML 2018, arXiv 1710.06952): stragglers do not block other ranks.

    Every rank trains at its own pace and averages asynchronously with one random neighbor at a
    time. Push-sum weights stay 1, and the sum over ranks is conserved. An exchange takes about
    three steps from request to reply; each rank has at most one request of its own in flight and
    replies to at most one in a step.

    ``flush()``, ``consensus()`` and ``consensus_distance()`` must be called by all ranks together
    and wait for the slowest. In ``join()`` only ranks without batches wait. A rank must not exit
    while others still train: end with one of these calls.

    Parameters must be on the CPU, with gloo: a pending receive on NCCL would block the
    communicator's stream until the sender arrives.

    Args:
        topology: symmetric, such as ``Ring``, ``Torus``, ``Hypercube``, ``BipartiteExponential``,
            ``Star`` or ``Complete``; the edges of all its rounds are used at any time.
        seed: of the random choice of neighbors.
    """

    topology: Topology
    seed: int = 0

    def __post_init__(self) -> None:
        check_topology(self.topology)

    @override
    def config_fields(self) -> list[tuple[str, str]]:
        # Also by its edges: two custom topologies may have the same repr.
        return [("algorithm", repr(self)), ("topology", self.topology.fingerprint())]

    @override
    def validation_error(self, num_ranks: int) -> str | None:
        return (
            self.topology.validation_error(num_ranks) or Partners(self.topology).validation_error()
        )

    @override
    def start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        buckets: FlatBuckets,
        process_group: ProcessGroup | None,
    ) -> PairwiseAverager:
        """Start without exchanges in flight.

        Raises:
            ValueError: the parameters are not on the CPU.
        """
        device = buckets.buffers[0].device
        if device.type != "cpu":
            raise ValueError(
                "parameters must be on the CPU for ADPSGD, which communicates over gloo, got "
                f"{device}; SGP with overlap=1 overlaps its messages with compute on any device"
            )
        group: Any = process_group or dist.group.WORLD
        timeout = timeout_of(group).total_seconds()
        exchange, partners = NeighborExchange(group), Partners(self.topology, self.seed)
        num_flags = 1 + len(partners.active_neighbors(exchange.rank))
        flags = Flags(store_of(group), exchange.rank, num_flags)
        return PairwiseAverager(
            buckets.buffers, exchange, flags, partners, barrier_of(group), timeout, group
        )
