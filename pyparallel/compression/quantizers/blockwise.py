"""Compressors that encode blocks independently, averaged by an all-to-all and an all-gather."""

import abc
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ...comm.collectives import Collectives
from ..compressor import Compressor, Message
from ..corrupt_messages import CorruptMessageError, raise_if_any_corrupt, with_sender
from ..layout import BufferLayout
from ..residual import accumulate_residual
from ..state import CompressorState


class BlockwiseCompressor(Compressor):
    """A compressor whose message is its blocks' messages, concatenated tensor by tensor.

    A mean takes an all-to-all and an all-gather: rank i receives part i of every message, averages
    it in float32, encodes the mean again, and sends it to all ranks. A rank sends about two
    messages for any number of ranks (Alistarh et al., NeurIPS 2017, arXiv 1610.02132; later
    libraries call it scatter-reduce-allgather).
    """

    @property
    @abc.abstractmethod
    def granularity(self) -> int:
        """Blocks begin at multiples of this many entries."""

    @abc.abstractmethod
    def sizes(self, numel: int) -> tuple[int, ...]:
        """Return the length of each tensor of a message of ``numel`` entries."""

    @override
    def mean_(
        self,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Tensor | None = None,
    ) -> None:
        """Replace x by the mean over ranks of the decoded messages.

        The error of encoding the mean, times the number of ranks, goes into the residual of the
        rank that averaged: the mean of all residuals stays the accumulated error of the means.
        """
        parts = Parts.of(self, x.numel(), collectives.size)
        mine = parts.slices[collectives.rank]
        received = self._scatter(x, state, collectives, residual, parts)
        with collectives.stats.decoding():
            mean, corrupt_sender = self._average(
                received, parts.lengths[collectives.rank], collectives.size
            )
        lost = None if residual is None else torch.zeros_like(mean)
        with collectives.stats.encoding():
            message = self.compress(mean, _state_of_part(state, mine), lost)
        if residual is not None and lost is not None:
            accumulate_residual(residual[mine], lost, collectives.size)
        gathered = self._gather(message, parts, collectives)
        if x.device.type == "cpu":  # a GPU counts: the next message raises, no host sync
            raise_if_any_corrupt(corrupt_sender, collectives)
        with collectives.stats.decoding():
            self._decode(gathered, parts, x)

    def _scatter(
        self,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Tensor | None,
        parts: "Parts",
    ) -> list[Tensor]:
        with collectives.stats.encoding():
            message = self.compress(x, state, residual)
        coming = self.sizes(parts.lengths[collectives.rank])
        return [
            collectives.all_to_all(tensor, [self.sizes(n)[index] for n in parts.lengths], size)
            for index, (tensor, size) in enumerate(
                zip(message, ([n] * collectives.size for n in coming), strict=True)
            )
        ]

    def _average(
        self, received: list[Tensor], numel: int, num_ranks: int
    ) -> tuple[Tensor, int | None]:
        """Return the mean of a part, and the first sender of a corrupt message or None."""
        total = torch.zeros(numel, dtype=torch.float32, device=received[0].device)
        sizes, layout = self.sizes(numel), BufferLayout.flat(numel)
        for sender in range(num_ranks):
            message = tuple(
                tensor[sender * size : (sender + 1) * size]
                for tensor, size in zip(received, sizes, strict=True)
            )
            try:
                self.decompress(message, layout, total, accumulate=True)
            except CorruptMessageError:
                return total, sender
        return total.div_(num_ranks), None

    def _gather(self, message: Message, parts: "Parts", collectives: Collectives) -> list[Tensor]:
        """All-gather the message of the mean: for each tensor (ranks, longest)."""
        gathered = []
        for tensor, longest in zip(message, self.sizes(max(parts.lengths)), strict=True):
            padded = tensor
            if tensor.numel() < longest:
                padded = tensor.new_zeros(longest)
                padded[: tensor.numel()] = tensor
            gathered.append(collectives.all_gather(padded))
        return gathered

    def _decode(self, gathered: list[Tensor], parts: "Parts", x: Tensor) -> None:
        for sender, (numel, where) in enumerate(zip(parts.lengths, parts.slices, strict=True)):
            message = tuple(
                rows[sender, :size] for rows, size in zip(gathered, self.sizes(numel), strict=True)
            )
            with with_sender(sender):
                self.decompress(message, BufferLayout.flat(numel), x[where])


def _state_of_part(state: CompressorState, part: slice) -> CompressorState:
    """Return a state to encode the mean of a part, with random draws of its own."""
    layout = BufferLayout.flat(part.stop - part.start, f"{state.layout.names[:1]}[{part.start}:]")
    return CompressorState(layout, state.rank, state.step)


@dataclass(frozen=True)
class Parts:
    """The division of a buffer among ranks: at block boundaries, as even as these allow."""

    lengths: list[int]

    @classmethod
    def of(cls, compressor: BlockwiseCompressor, numel: int, num_ranks: int) -> "Parts":
        """Divide a buffer into equal parts, but for the last non-empty one and empty ones after."""
        blocks = -(-numel // compressor.granularity)
        longest = -(-blocks // num_ranks) * compressor.granularity
        return cls([max(0, min(longest, numel - i * longest)) for i in range(num_ranks)])

    @property
    def slices(self) -> list[slice]:
        """The slice of each part."""
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        return [slice(end - n, end) for end, n in zip(ends, self.lengths, strict=True)]
