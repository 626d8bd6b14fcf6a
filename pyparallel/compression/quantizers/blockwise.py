"""Compressors that encode runs of neighbors on their own, averaged in two shots."""

import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from ...comm.collectives import Collectives
from ..compressor import Compressor, Message
from ..layout import BufferLayout
from ..residual import accumulate_residual
from ..state import CompressorState
from ..validation import CorruptMessageError, naming_the_sender, raise_if_any_corrupt


class BlockwiseCompressor(Compressor):
    """A message of a buffer is the messages of its blocks, joined tensor by tensor.

    So a mean takes two shots: rank i gets part i of every message, averages in float32, and sends
    the mean, encoded once more, to all. No rank sends more than about two messages, however many
    ranks there are (Alistarh et al., NeurIPS 2017, arXiv 1610.02132, reduce by ranges of entries;
    the same as scatter-reduce-allgather in later libraries).
    """

    @property
    @abc.abstractmethod
    def granularity(self) -> int:
        """Blocks begin at multiples of this many entries."""

    @abc.abstractmethod
    def sizes(self, numel: int) -> tuple[int, ...]:
        """The length of each tensor of the message of this many entries."""

    def mean_(
        self,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Tensor | None = None,
    ) -> None:
        """As `Compressor.mean_`.

        What the second shot loses goes, times the number of ranks, into the residual of the rank
        that averaged: the mean of all residuals stays what the means so far have lost.
        """
        parts = Parts.of(self, x.numel(), collectives.size)
        mine = parts.slices[collectives.rank]
        received = self._scatter(x, state, collectives, residual, parts)
        with collectives.stats.decoding():
            mean, culprit = self._average(
                received, parts.lengths[collectives.rank], collectives.size
            )
        lost = None if residual is None else torch.zeros_like(mean)
        with collectives.stats.encoding():
            message = self.compress(mean, _state_of_part(state, mine), lost)
        if residual is not None and lost is not None:
            accumulate_residual(residual[mine], lost, collectives.size)
        gathered = self._gather(message, parts, collectives)
        if x.device.type == "cpu":  # elsewhere the device stops, and the host does not wait
            raise_if_any_corrupt(culprit, collectives)
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
        """The mean of a part over its senders, and the first of these whose message is corrupt."""
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
        """Of each tensor of the message (ranks, longest): what each rank has sent."""
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
            with naming_the_sender(sender):
                self.decompress(message, BufferLayout.flat(numel), x[where])


def _state_of_part(state: CompressorState, part: slice) -> CompressorState:
    """For the second shot of a rank, which draws apart from the first."""
    layout = BufferLayout.flat(part.stop - part.start, f"{state.layout.names[:1]}[{part.start}:]")
    return CompressorState(layout, state.rank, state.step)


@dataclass(frozen=True)
class Parts:
    """How a buffer is divided among ranks: at blocks, as evenly as these allow."""

    lengths: list[int]

    @classmethod
    def of(cls, compressor: BlockwiseCompressor, numel: int, num_ranks: int) -> "Parts":
        """All parts but the last ones that are not empty have the same length."""
        blocks = -(-numel // compressor.granularity)
        longest = -(-blocks // num_ranks) * compressor.granularity
        return cls([max(0, min(longest, numel - i * longest)) for i in range(num_ranks)])

    @property
    def slices(self) -> list[slice]:
        """Where each part lies."""
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        return [slice(end - n, end) for end, n in zip(ends, self.lengths, strict=True)]
