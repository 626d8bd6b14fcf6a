"""Asynchronous decentralized parallel SGD: pairs that average while everybody goes on training."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join
from torch.optim import Optimizer

from ...comm import Flags, FlatBuckets, NeighborExchange, barrier_of, new_group, timeout_of
from ..topology import Topology
from .pairwise import PairwiseRounds
from .partners import Partners
from .rounds import GossipSession


@dataclass(frozen=True)
class ADPSGD:
    """AD-PSGD (Lian et al., ICML 2018, arXiv 1710.06952): a slow rank does not slow the others.

    Every rank trains at its own pace. Now and then it averages with one neighbor, chosen at random,
    without waiting for it: ``PairwiseRounds`` says how. Weights stay 1, and the sum over ranks is
    conserved. An exchange takes about three steps from request to answer; each rank has one request
    of its own under way, and answers at most one in a step.

    ``flush()``, ``consensus()`` and ``consensus_distance()`` are for all ranks together, and wait
    for the slowest. In ``join()`` nobody waits but who is done. A rank must not leave before the
    others are done: end with one of these.

    Runs on parameters in the CPU's memory, over gloo: a receive posted on NCCL would hold up the
    communicator's stream until its sender comes.

    Args:
        topology: symmetric, such as ``Ring``, ``Torus``, ``Hypercube``, ``BipartiteExponential``,
            ``Star`` or ``Complete``; the edges of all its rounds count, at any time.
        seed: of the choice among neighbors.
    """

    topology: Topology
    seed: int = 0

    def config_fields(self) -> list[tuple[str, str]]:
        """The topology by name, then by its edges: a user's own class may share a name."""
        return [("algorithm", repr(self)), ("topology", self.topology.fingerprint())]

    def validation_error(self, num_ranks: int) -> str | None:
        """A topology for another number of ranks, or that does not validate, or not symmetric."""
        return (
            self.topology.validation_error(num_ranks) or Partners(self.topology).validation_error()
        )

    def start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        buckets: FlatBuckets,
        process_group: ProcessGroup | None,
    ) -> GossipSession:
        """Begin with nothing under way.

        Raises:
            ValueError: parameters that are not in the CPU's memory.
        """
        device = buckets.buffers[0].device
        if device.type != "cpu":
            raise ValueError(
                "parameters must be on the CPU for ADPSGD, whose messages travel over gloo, got "
                f"{device}; SGP with overlap=1 hides its messages on any device"
            )
        apart = new_group(range(dist.get_world_size(process_group)), process_group)
        patience = timeout_of(process_group).total_seconds()
        exchange, partners = NeighborExchange(apart), Partners(self.topology, self.seed)
        num_flags = 1 + len(partners.askers_of(exchange.rank))
        flags = Flags(apart.get_group_store(), exchange.rank, num_flags)
        meet = barrier_of(process_group)
        rounds = PairwiseRounds(buckets.buffers, exchange, flags, partners, meet, patience)
        return NonBlockingSession(module, rounds, apart)


class NonBlockingSession(GossipSession):
    """A session that does not wait, in ``join()``, to tell the others that it still trains."""

    def __init__(self, module: nn.Module, rounds: PairwiseRounds, apart: ProcessGroup) -> None:
        super().__init__(module, rounds, apart)
        self._pairs = rounds
        self._notice: dist.Work | None = None

    def close(self) -> None:
        """Let go of what is under way."""
        self._pairs.drop()
        self._notice = None

    def _notify_joined_ranks(self) -> None:
        """Take part in the next of the join context's rounds, if the last one is over.

        The others do so at their own pace, so a step never waits here, and a rank that is done
        gets to answer whenever the slowest has taken a step.
        """
        if self._notice is not None and not self._notice.is_completed():
            return
        self._notice = Join.notify_join_context(self)
