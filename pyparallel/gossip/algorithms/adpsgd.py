"""Asynchronous decentralized parallel SGD: pairwise averaging that does not block training."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import Run, store_of, timeout_of
from ...training import FlatBuckets, Place
from ...training.arguments import require
from ..messages import Flags, NeighborExchange
from ..topology import BaseGraph
from .base import OnTopology
from .pairwise import PairwiseAverager
from .partners import Partners


def adpsgd(sent: Tensor, x_i: Tensor, x_j: Tensor) -> tuple[Tensor, Tensor]:
    """Average an active rank i with a passive rank j; return x of both after it.

    Args:
        sent: x_i as it was when the request was sent.
        x_i: (d,) parameters of the active rank, which has updated them since.
        x_j: (d,) parameters of the passive rank.
    """
    d = sent - x_j
    return x_i - d / 2, x_j + d / 2  # if x_i is what was sent, both are (x_i + x_j) / 2


@dataclass(frozen=True)
class ADPSGD(OnTopology):
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
            ``Star`` or ``Complete``, or such a class; None: ``BaseGraph``. The edges of all its
            rounds are used at any time.
    """

    default = BaseGraph
    can_be_inner = False
    refuses_shards = (
        "take the same rounds for all shards of",
        ", whose ranks exchange at their own pace: use SGP with overlap=1",
    )
    seed: int = 0

    @override
    def error_at(self, place: Place) -> str | None:
        return super().error_at(place) or Partners(self.bound_topology).find_asymmetry()

    @override
    def start(
        self, module: nn.Module, optimizer: Optimizer, buckets: FlatBuckets, run: Run
    ) -> PairwiseAverager:
        """Start without exchanges in flight; a ValueError unless the parameters are on the CPU."""
        device = buckets.buffers[0].device
        rule = "parameters must be on the CPU for ADPSGD, which communicates over gloo"
        fix = "SGP with overlap=1 overlaps its messages with compute on any device"
        require(device.type == "cpu", rule, str(device), fix)
        timeout = timeout_of(run.group).total_seconds()
        exchange = NeighborExchange(run, has_counts=False)  # every rank trains at its own pace
        partners = Partners(self.bound_topology, self.seed)
        num_flags = 1 + len(partners.active_neighbors(exchange.rank))
        flags = Flags(store_of(run.group), exchange.rank, num_flags)
        return PairwiseAverager(buckets.buffers, exchange, flags, partners, run.barrier, timeout)
