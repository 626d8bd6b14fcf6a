"""What an average over all ranks costs: measured with a compressor."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ..compression import Collectives, CommStats


@dataclass(frozen=True)
class Cost:
    """What it costs a rank to average a model's gradients or weights with one compressor."""

    name: str  # of the compressor in tables
    coding: float  # seconds of encoding and decoding
    payload_bytes: float  # of the encoded messages
    wire_bytes: float  # sent
    collectives: int  # how many
    buckets: tuple[float, ...] = (1.0,)  # of gradients, each one's share of all bytes, in order

    def reduced_bytes(self, num_ranks: int) -> float:
        """Return the bytes of an all-reduce in which a rank sends as much."""
        return self.wire_bytes * num_ranks / max(1, 2 * (num_ranks - 1))


class SingleRankCollectives(Collectives):
    """Collectives of rank 0 without a process group, as if all ranks had its data."""

    def __init__(self, num_ranks: int) -> None:
        self.rank = 0
        self.size = num_ranks
        self.stats = CommStats()
        self.collectives = 0

    @override
    def all_reduce_(self, tensor: Tensor) -> None:
        self._count(tensor, 2 * (self.size - 1) / self.size)
        tensor.mul_(self.size)

    @override
    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """Broadcast; another rank's tensor is 0, 1, 2, ..., which is also valid as indices."""
        self._count(tensor, (self.size - 1) / self.size)
        if source != self.rank:
            tensor.copy_(torch.arange(tensor.numel(), device=tensor.device).view_as(tensor))

    @override
    def all_to_all(
        self, tensor: Tensor, sizes_out: Sequence[int], sizes_in: Sequence[int]
    ) -> Tensor:
        self._count(tensor, 1 - sizes_out[0] / max(1, sum(sizes_out)))
        return tensor[: sizes_out[0]].repeat(self.size)

    @override
    def all_gather(self, tensor: Tensor) -> Tensor:
        self._count(tensor, self.size - 1)
        return tensor.expand(self.size, -1).clone()

    def _count(self, tensor: Tensor, times: float) -> None:
        self.stats.count(tensor, times)
        self.collectives += 1
