"""Compressors that encode blocks independently, averaged by an all-to-all and an all-gather."""

import abc
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from ...comm.collectives import Collectives
from ..compressor import Compressor, Message
from ..corrupt_messages import CorruptMessageError, with_sender
from ..layout import BufferLayout
from ..residual import Residual, accumulate_residual
from ..state import CompressorState


class BlockwiseCompressor(Compressor):
    """A compressor whose message is its blocks' messages, concatenated tensor by tensor.

    A mean takes an all-to-all and an all-gather: rank i receives part i of every message, averages
    it in float32, encodes the mean again, and sends it to all ranks. A rank sends about two
    messages for any number of ranks (Alistarh et al., NeurIPS 2017, arXiv 1610.02132; later
    libraries call it scatter-reduce-allgather).
    """

    accepts_all = False
    """Whether every message of the right lengths can be decoded."""

    @property
    @abc.abstractmethod
    def granularity(self) -> int:
        """Blocks begin at multiples of this many entries."""

    @abc.abstractmethod
    def sizes(self, numel: int) -> tuple[int, ...]:
        """Return the length of each tensor of a message of ``numel`` entries."""

    @override
    def mean_(
        self, x: Tensor, state: CompressorState, collectives: Collectives, residual: Residual = None
    ) -> None:
        """Replace x by the mean over ranks of the decoded messages.

        The error of encoding the mean, times the number of ranks, goes into the residual of the
        rank that averaged: the mean of all residuals stays the accumulated error of the means.
        """
        parts = Parts.of(self, x.numel(), collectives.size)
        mine = parts.slices[collectives.rank]
        received = self._scatter(x, state, collectives, residual, parts)
        lost = None
        if residual is not None:
            lost = torch.zeros(mine.stop - mine.start, dtype=torch.float32, device=x.device)
        of_mean = _state_of_part(state, mine)
        message, corrupt_sender = self._average(received, of_mean, collectives, lost)
        if residual is not None and lost is not None:
            accumulate_residual(residual[mine], lost, collectives.size)
        # A GPU counts corrupt entries, and a later message raises: the host does not wait.
        sends_verdict = x.device.type == "cpu" and not self.accepts_all
        if sends_verdict:
            message = (
                *message,
                torch.tensor([-1 if corrupt_sender is None else corrupt_sender], device="cpu"),
            )
        gathered = self._gather(message, parts, collectives)
        if sends_verdict:
            for rank, (*_, corrupt) in enumerate(gathered):
                if (sender := int(corrupt)) >= 0:
                    with with_sender(sender):
                        raise CorruptMessageError(f"refused by rank {rank}")
        with collectives.stats.decoding():
            self._decode(gathered, parts, x)

    def _scatter(
        self,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Residual,
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
        self,
        received: list[Tensor],
        state: CompressorState,
        collectives: Collectives,
        lost: Residual,
    ) -> tuple[Message, int | None]:
        """Encode the mean of a part, of messages that are concatenated tensor by tensor.

        Return the message, whose error is written to ``lost``, and the first sender of a corrupt
        message or None.
        """
        with collectives.stats.decoding():
            mean, corrupt_sender = self._decode_mean(received, state.layout, collectives.size)
        with collectives.stats.encoding():
            return self.compress(mean, state, lost), corrupt_sender

    def _decode_mean(
        self, received: list[Tensor], layout: BufferLayout, num_ranks: int
    ) -> tuple[Tensor, int | None]:
        total = torch.zeros(layout.numel, dtype=torch.float32, device=received[0].device)
        sizes = self.sizes(layout.numel)
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

    def _gather(self, message: Message, parts: "Parts", collectives: Collectives) -> list[Message]:
        """All-gather the message of the mean, padded to the longest part, and what follows it."""
        sizes = self.sizes(max(parts.lengths))
        padded = [
            tensor
            if tensor.numel() == longest
            else functional.pad(tensor, (0, longest - tensor.numel()))
            for tensor, longest in zip(message, sizes, strict=False)
        ]
        return collectives.all_gather_each([*padded, *message[len(sizes) :]])

    def _decode(self, gathered: list[Message], parts: "Parts", x: Tensor) -> None:
        for sender, (numel, where) in enumerate(zip(parts.lengths, parts.slices, strict=True)):
            message = tuple(
                tensor[:size]
                for tensor, size in zip(gathered[sender], self.sizes(numel), strict=False)
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
        ends = accumulate(self.lengths)
        return [slice(end - n, end) for end, n in zip(ends, self.lengths, strict=True)]
