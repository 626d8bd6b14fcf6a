"""Compressors that encode blocks independently, averaged by an all-to-all and an all-gather."""

import abc
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from ...comm.collectives import Collectives, packed_bytes, unpack
from ...ops import add_or_clear_
from ..compressor import Compressor, Message
from ..corrupt_messages import CorruptMessageError, with_sender
from ..layout import BufferLayout
from ..residual import Residual
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

    dtypes: Sequence[torch.dtype] = ()
    """Of the tensors of a message, which are then sent as one; empty: each is sent alone."""

    finds_nonfinite = False
    """Whether the last of ``dtypes`` is of scales, nan for a block with a nan or an inf."""

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
        residual: Residual = None,
        *,
        drops: bool = False,
    ) -> Tensor | None:
        """Replace x by the mean over ranks of the decoded messages.

        The error of encoding the mean, times the number of ranks, goes into the residual of the
        rank that averaged: the mean of all residuals stays the accumulated error of the means.
        """
        parts = divide(x.numel(), self.granularity, collectives.size)
        mine, numel = parts.slices[collectives.rank], parts.lengths[collectives.rank]
        received = self._scatter(x, state, collectives, residual, parts, drops=drops)
        lost = None
        if residual is not None:
            lost = torch.zeros(numel, dtype=torch.float32, device=x.device)
        of_ranks = received.pop().flatten().clone() if drops else None
        # Random draws of the mean are its own.
        layout = BufferLayout.flat(numel, f"{state.layout.names[:1]}[{mine.start}:]")
        of_mean = CompressorState(layout, state.rank, state.step)
        message, corrupt_sender = self._average(received, of_mean, collectives, lost)
        del received  # its memory is used again
        if residual is not None and lost is not None:
            add_or_clear_(residual[mine], lost, times=collectives.size)
        sizes = zip(message, self.sizes(max(parts.lengths)), strict=True)
        padded = [
            each if each.numel() == longest else functional.pad(each, (0, longest - each.numel()))
            for each, longest in sizes
        ]
        # A GPU counts corrupt entries, and a later message raises: the host does not wait.
        sends_verdict = x.device.type == "cpu" and not self.accepts_all
        if sends_verdict:
            verdict = -1 if corrupt_sender is None else corrupt_sender
            padded.append(torch.tensor([verdict], device="cpu"))
        gathered = collectives.all_gather_rows(padded)
        if sends_verdict:
            for rank, (sender,) in enumerate(gathered.pop().tolist()):
                if sender >= 0:
                    with with_sender(sender):
                        raise CorruptMessageError(f"refused by rank {rank}")
        with collectives.stats.decoding():
            self._decode(gathered, parts, x)
        return of_ranks

    def _scatter(
        self,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Residual,
        parts: "Parts",
        *,
        drops: bool,
    ) -> list[Tensor]:
        """Send each rank its part of the message; return, per tensor, a row for each sender."""
        size, coming = collectives.size, self.sizes(parts.lengths[collectives.rank])
        lengths = list(zip(*map(self.sizes, parts.lengths), strict=True))  # per tensor, by rank
        if not self.dtypes or x.numel() == 0:
            with collectives.stats.encoding():
                message = self.compress(x, state, residual)
            return [
                collectives.all_to_all(tensor, of_ranks, [length] * size).view(size, length)
                for tensor, of_ranks, length in zip(message, lengths, coming, strict=True)
            ]
        whole = -(-max(parts.lengths) // self.granularity) * self.granularity
        kinds = (*zip(self.sizes(whole), self.dtypes, strict=True), *[(1, torch.bool)] * drops)
        width = packed_bytes(kinds)
        packed = torch.empty(size, width, dtype=torch.uint8, device=x.device)
        if (written := x.numel() // whole) < size:
            packed[written:].zero_()  # of ranks whose part is shorter, or empty
        *rows, last = unpack(packed, kinds)
        with collectives.stats.encoding():
            self._encode(x, state, residual, rows if drops else [*rows, last])
            if drops:
                last.copy_(self._drop_nonfinite_(rows[-1], residual))
        for of_ranks, dtype in zip(lengths, self.dtypes, strict=True):
            kept = of_ranks[collectives.rank] / max(1, sum(of_ranks))
            num_bytes = sum(of_ranks) * dtype.itemsize
            collectives.stats.count(packed.view(-1)[:num_bytes], 1 - kept)
        with collectives.uncounted():
            received = collectives.all_to_all(packed.view(-1), [width] * size, [width] * size)
        tensors = unpack(received.view(size, width), kinds)
        return [each[:, :length] for each, length in zip(tensors, (*coming, 1), strict=False)]

    def _encode(
        self, x: Tensor, state: CompressorState, residual: Residual, rows: Sequence[Tensor]
    ) -> None:
        """Write the message to the rows of each tensor, (ranks, length), a row for each part."""
        for target, tensor in zip(rows, self.compress(x, state, residual), strict=True):
            whole, rest = divmod(tensor.numel(), max(1, target.size(1)))
            target[:whole].copy_(tensor[: tensor.numel() - rest].view(whole, target.size(1)))
            if rest:
                target[whole, :rest].copy_(tensor[-rest:])

    def _drop_nonfinite_(self, scales: Tensor, residual: Residual) -> Tensor:
        """Make a message decode to zeros if a block had a nan or an inf; return whether, 0-d.

        The residual becomes 0 then: what was sent of it is dropped, what is left has x in it.
        """
        is_bad = scales.amax().isnan()
        scales.masked_fill_(is_bad, 0.0)
        if residual is not None:
            add_or_clear_(residual, clear=is_bad)
        return is_bad

    def _average(
        self,
        received: list[Tensor],
        state: CompressorState,
        collectives: Collectives,
        lost: Residual,
    ) -> tuple[Message, int | None]:
        """Encode the mean of a part, of messages with a row for each sender in each tensor.

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
        for sender, message in enumerate(zip(*received, strict=True)):
            try:
                self.decompress(message, layout, total, accumulate=True)
            except CorruptMessageError:
                return total, sender
        return total.div_(num_ranks), None

    def _decode(self, gathered: list[Tensor], parts: "Parts", x: Tensor) -> None:
        for sender, (numel, where) in enumerate(zip(parts.lengths, parts.slices, strict=True)):
            message = tuple(
                rows[sender, :size] for rows, size in zip(gathered, self.sizes(numel), strict=True)
            )
            with with_sender(sender):
                self.decompress(message, BufferLayout.flat(numel), x[where])


class Parts(NamedTuple):
    """The lengths and places of the parts of a buffer, one for each rank."""

    lengths: tuple[int, ...]
    slices: tuple[slice, ...]


@lru_cache(1024)
def divide(numel: int, granularity: int, num_ranks: int) -> Parts:
    """Divide a buffer into equal parts, but for the last non-empty one and empty ones after.

    They begin at block boundaries, and are as even as these allow.
    """
    longest = -(-numel // (granularity * num_ranks)) * granularity
    ends = [min(numel, rank * longest) for rank in range(num_ranks + 1)]
    slices = tuple(slice(begin, end) for begin, end in pairwise(ends))
    return Parts(tuple(each.stop - each.start for each in slices), slices)
