"""Stochastic Gradient Push: a local step on the numerator, then a round of PushSum."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ...comm import FlatBuckets, NeighborExchange, new_group
from ...compression import AttachPoint, Compressor
from ..push_sum.compressed_buffer import CompressedBuffer
from ..push_sum.layout import layouts_of
from ..push_sum.push_sum import PushSum
from ..topology import Topology
from .rounds import GossipSession


@dataclass(frozen=True)
class SGP:
    """Stochastic Gradient Push (Assran et al., ICML 2019, arXiv 1811.10792), Algorithm 1.

    Each step every rank updates its own model with its own optimizer, then sends it to the
    topology's out-neighbors and averages it with what arrives. Momentum buffers stay local.

    With ``overlap=1`` (OSGP) a step's message travels while the next batch is computed, and is
    merged just before the next update: nothing is copied, and on regular topologies every update
    still finds the weight at 1. With ``overlap=tau > 1`` a message leaves every tau steps, from a
    copy, and is merged tau steps later. Updates in between act on the numerator of what the rank
    has kept, so their effective learning rate is lr / w with w < 1 (twice lr for one peer), which
    must still be stable.

    Args:
        topology: who averages with whom, for as many ranks as the process group has.
        overlap: for how many steps a message may travel; 0: the round is complete when
            ``optimizer.step()`` returns.
        compressor: of the messages; None: parameters travel as they are. It compresses what a rank
            has moved since it last said where it was (`CompressedBuffer`), so it needs no error
            feedback; ranks still meet, as the messages get smaller with what there is to say. An
            aggressive one needs a topology that moves less of the mass at a time: ``Lazy``, which
            says how much less. Memory: as many copies of the parameters as `Replicas` says.
    """

    topology: Topology
    overlap: int = 0
    compressor: Compressor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.overlap, int) or self.overlap < 0:
            raise ValueError(f"overlap must be a number of steps, at least 0, got {self.overlap!r}")
        if not isinstance(self.compressor, Compressor | None):
            raise ValueError(f"compressor must be a Compressor or None, got {self.compressor!r}")

    def config_fields(self) -> list[tuple[str, str]]:
        """The topology by name, then by its edges: a user's own class may share a name."""
        return [("algorithm", repr(self)), ("topology", self.topology.fingerprint())]

    def validation_error(self, num_ranks: int) -> str | None:
        """A topology or a compressor that does not serve."""
        return self.topology.validation_error(num_ranks) or self._problem_of_compressor()

    def start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        buckets: FlatBuckets,
        process_group: ProcessGroup | None,
    ) -> GossipSession:
        """Begin with mass 1 on every rank.

        Raises:
            ValueError: 16-bit parameters where the optimizer must step on the numerator: scaling
                them by the mass and back would round away small updates, and overflow in fp16.
        """
        low = {buffer.dtype for buffer in buckets.buffers} - {torch.float32}
        if low and not (self.topology.regular and self.overlap <= 1):
            raise ValueError(
                "parameters must be float32 where weights leave 1 (on a topology that is not "
                f"regular, or with overlap > 1), got {', '.join(sorted(map(str, low)))} with {self}"
            )
        exchange = NeighborExchange(_group_for(self.overlap, process_group))
        averaging = self._averaging(module, buckets, exchange)
        return GossipSession(module, PushSumRounds(averaging, self.overlap), process_group)

    def _averaging(
        self, module: nn.Module, buckets: FlatBuckets, exchange: NeighborExchange
    ) -> PushSum:
        if self.compressor is None:
            return PushSum(buckets.buffers, exchange, self.topology, snapshot=self.overlap > 1)
        averages = [
            CompressedBuffer(buffer, exchange, self.topology, self.compressor, layout)
            for buffer, layout in zip(buckets.buffers, layouts_of(buckets, module), strict=True)
        ]
        return PushSum.of(averages, exchange, self.topology)

    def _problem_of_compressor(self) -> str | None:
        if self.compressor is None:
            return None
        problem = self.compressor.validation_error(AttachPoint.GOSSIP)
        if problem is None and not self.compressor.fixed_length:
            return (
                "compressor must make messages of one length for gossip, where receivers know it "
                f"beforehand, got {self.compressor}"
            )
        return problem


def _group_for(overlap: int, process_group: ProcessGroup | None) -> ProcessGroup | None:
    """Rounds that overlap with the user's own collectives need a group, and a stream, apart."""
    if overlap == 0:
        return process_group
    return new_group(range(dist.get_world_size(process_group)), process_group)


class PushSumRounds:
    """The rounds of SGP on one rank.

    A round is sent after a step and merged ``overlap`` steps later, just before the update; with
    ``overlap=0`` it is merged at once.
    """

    def __init__(self, averaging: PushSum, overlap: int) -> None:
        self._averaging = averaging
        self._overlap = overlap
        self._steps_under_way = 0

    @property
    def weight(self) -> Tensor:
        """The rank's mass: exactly 1 on regular topologies with nothing in flight."""
        return self._averaging.weight

    @property
    def bytes_sent(self) -> int:
        """Parameters and masses sent to neighbors so far."""
        return self._averaging.exchange.bytes_sent

    def closure_error(self) -> str | None:
        """The numerator is not what the closure would have to compute with."""
        if self._averaging.topology.regular and self._overlap <= 1:
            return None
        return (
            "closure must be None where weights leave 1 (on a topology that is not regular, or "
            "with overlap > 1): the optimizer steps on the numerator, where the closure would "
            "compute a wrong loss"
        )

    def settle(self) -> None:
        """De-bias what an exception inside the optimizer's step has left as the numerator."""
        self._averaging.to_debiased()

    def begin(self) -> None:
        """Merge the round under way if it is due."""
        self._steps_under_way += 1
        if self._steps_under_way >= self._overlap:
            self._averaging.merge()

    def enter_update(self) -> None:
        """Let the optimizer find the numerator, as the paper's update rule wants."""
        self._averaging.to_numerator()

    def leave_update(self) -> None:
        """De-bias."""
        self._averaging.to_debiased()

    def end(self) -> None:
        """Take the round, or let it begin if the last one has been merged."""
        if not self._averaging.in_flight:
            self._averaging.send()
            self._steps_under_way = 0
        if self._overlap == 0:
            self._averaging.merge()

    def flush(self) -> None:
        """Merge the round under way now."""
        self._averaging.merge()

    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """The buffers and the weight with the round under way counted in; nothing changes."""
        return self._averaging.as_merged()

    def state_dict(self) -> dict[str, Any]:
        """Round, masses, and what is not merged yet."""
        steps = self._steps_under_way
        return {"averaging": self._averaging.state_dict(), "steps_under_way": steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there."""
        self._averaging.load_state_dict(state["averaging"])
        self._steps_under_way = state["steps_under_way"]

    def restart(self) -> None:
        """Give every rank the same mass again."""
        self._averaging.reset_weight()
