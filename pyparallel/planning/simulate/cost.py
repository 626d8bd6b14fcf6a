"""What averages cost: measured with a compressor, or the bytes it sends of a matrix."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ...compression import BufferLayout, Collectives, CommStats, Compressor, Piece

_SIDE = 512  # of the matrix on which compressors are tried


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


def _tried() -> tuple[Tensor, BufferLayout]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_SIDE * _SIDE, generator=generator, device="cpu")
    return x, BufferLayout((Piece("layer.weight", (_SIDE, _SIDE)),))


def gossip_ratio(compressor: Compressor | None) -> float:
    """Return the bytes of a message over those in float32."""
    if compressor is None:
        return 1.0
    x, layout = _tried()
    message = compressor.compress(x, compressor.init(layout, x.device))
    return sum(part.numel() * part.element_size() for part in message) / x.nbytes


def collective_ratio(compressor: Compressor | None, num_ranks: int) -> float:
    """Return the float32 fraction whose ring all-reduce sends as much as the compressor's mean.

    A rank sends ``a (n - 1) + b (n - 1) / n`` bytes: its message to all others, or parts of sums.
    """
    if compressor is None or num_ranks == 1:
        return 1.0
    of_two, of_four = (_sent_bytes(compressor, size) for size in (2, 4))
    b = (3 * of_two - of_four) / 0.75
    a = of_two - b / 2
    sent = a * (num_ranks - 1) + b * (num_ranks - 1) / num_ranks
    return sent * num_ranks / (2 * (num_ranks - 1)) / (4 * _SIDE * _SIDE)


def _sent_bytes(compressor: Compressor, num_ranks: int) -> float:
    x, layout = _tried()
    collectives = SingleRankCollectives(num_ranks)
    compressor.mean_(x, compressor.init(layout, x.device), collectives)
    return collectives.stats.wire_bytes
