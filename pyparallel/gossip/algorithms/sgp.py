"""Stochastic Gradient Push: a local step on the numerator, then a PushSum round."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import FlatBuckets, NeighborExchange, new_group
from ...compression import AttachPoint, Compressor
from ..push_sum.compressed_buffer import CompressedBuffer
from ..push_sum.layout import layouts_of
from ..push_sum.push_sum import PushSum
from ..topology import Topology
from .base import Algorithm
from .rounds import GossipSession, Rounds


@dataclass(frozen=True)
class SGP(Algorithm):
    """Stochastic Gradient Push (Assran et al., ICML 2019, arXiv 1811.10792), Algorithm 1.

    In each step every rank updates its own model with its own optimizer, then sends it to the
    topology's out-neighbors and averages it with the received messages. Optimizer state such as
    momentum stays local.

    With ``overlap=1`` (OSGP) a step's message is in flight during the next forward and backward and
    is merged just before the next update: no copy is made, and on regular topologies the push-sum
    weight is 1 at every update. With ``overlap=tau > 1`` a message is sent every tau steps, from a
    copy, and merged tau steps later. Updates in between act on the numerator that the rank has
    kept, so their effective learning rate is lr / w with w < 1 (twice lr for one peer), which must
    still be stable.

    Args:
        topology: the neighbors of each round, for as many ranks as the process group has.
        overlap: number of steps for which messages may be in flight; 0: the round is complete when
            ``optimizer.step()`` returns.
        compressor: of the messages; None: parameters are sent uncompressed. It compresses deltas
            against the receivers' copy (CHOCO-SGD, see `CompressedBuffer`), so it needs no error
            feedback and ranks still reach consensus. An aggressive one needs smaller shares: use
            ``Lazy``, which lists suitable factors. Memory: as many copies of the parameters as
            `Replicas` documents.
    """

    topology: Topology
    overlap: int = 0
    compressor: Compressor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.overlap, int) or self.overlap < 0:
            raise ValueError(f"overlap must be a number of steps, at least 0, got {self.overlap!r}")
        if not isinstance(self.compressor, Compressor | None):
            raise ValueError(f"compressor must be a Compressor or None, got {self.compressor!r}")

    @override
    def config_fields(self) -> list[tuple[str, str]]:
        # Also by its edges: two custom topologies may have the same repr.
        return [("algorithm", repr(self)), ("topology", self.topology.fingerprint())]

    @override
    def validation_error(self, num_ranks: int) -> str | None:
        return self.topology.validation_error(num_ranks) or self._find_compressor_error()

    @override
    def start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        buckets: FlatBuckets,
        process_group: ProcessGroup | None,
    ) -> GossipSession:
        """Start with push-sum weight 1 on every rank.

        Raises:
            ValueError: 16-bit parameters although the optimizer must step on the numerator: scaling
                them by the weight and back would round away small updates, and overflow in fp16.
        """
        low = {buffer.dtype for buffer in buckets.buffers} - {torch.float32}
        if low and not (self.topology.regular and self.overlap <= 1):
            raise ValueError(
                "parameters must be float32 if push-sum weights differ from 1 (on a topology that "
                "is not regular, or with overlap > 1), got "
                f"{', '.join(sorted(map(str, low)))} with {self}"
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

    def _find_compressor_error(self) -> str | None:
        if self.compressor is None:
            return None
        error_text = self.compressor.validation_error(AttachPoint.GOSSIP)
        if error_text is None and not self.compressor.fixed_length:
            return (
                "compressor must make messages of one length for gossip, as receivers allocate "
                f"them in advance, got {self.compressor}"
            )
        return error_text


def _group_for(overlap: int, process_group: ProcessGroup | None) -> ProcessGroup | None:
    """Return a new group for overlapped rounds: they must not share one with other collectives."""
    if overlap == 0:
        return process_group
    return new_group(range(dist.get_world_size(process_group)), process_group)


class PushSumRounds(Rounds):
    """The rounds of SGP on one rank.

    A round is sent after a step and merged ``overlap`` steps later, just before the update; with
    ``overlap=0`` it is merged immediately.
    """

    def __init__(self, averaging: PushSum, overlap: int) -> None:
        self._averaging = averaging
        self._overlap = overlap
        self._steps_in_flight = 0

    @property
    @override
    def weight(self) -> Tensor:
        """Push-sum weight: exactly 1 on regular topologies without messages in flight."""
        return self._averaging.weight

    @property
    @override
    def bytes_sent(self) -> int:
        return self._averaging.exchange.bytes_sent

    @override
    def closure_error(self) -> str | None:
        if self._averaging.topology.regular and self._overlap <= 1:
            return None
        return (
            "closure must be None if push-sum weights differ from 1 (on a topology that is not "
            "regular, or with overlap > 1): the optimizer steps on the numerator, with which the "
            "closure would compute a wrong loss"
        )

    @override
    def restore_debiased(self) -> None:
        self._averaging.to_debiased()

    @override
    def begin(self) -> None:
        """Merge the round in flight if it is due."""
        self._steps_in_flight += 1
        if self._steps_in_flight >= self._overlap:
            self._averaging.merge()

    @override
    def enter_update(self) -> None:
        """Turn z into the numerator x, on which the paper's update rule steps."""
        self._averaging.to_numerator()

    @override
    def leave_update(self) -> None:
        self._averaging.to_debiased()

    @override
    def end(self) -> None:
        """Start a round if the last one has been merged; without overlap also merge it."""
        if not self._averaging.in_flight:
            self._averaging.send()
            self._steps_in_flight = 0
        if self._overlap == 0:
            self._averaging.merge()

    @override
    def flush(self) -> None:
        self._averaging.merge()

    @override
    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        return self._averaging.as_merged()

    @override
    def state_dict(self) -> dict[str, Any]:
        steps = self._steps_in_flight
        return {"averaging": self._averaging.state_dict(), "steps_under_way": steps}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._averaging.load_state_dict(state["averaging"])
        self._steps_in_flight = state["steps_under_way"]

    @override
    def restart(self) -> None:
        """Reset the push-sum weight to 1."""
        self._averaging.reset_weight()
