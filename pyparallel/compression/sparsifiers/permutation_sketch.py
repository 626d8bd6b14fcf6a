"""Compressors whose messages are shares of a permutation, each weighed in its own way."""

import abc
from typing import TypeVar

import torch
from torch import Tensor

from ...comm.collectives import Collectives
from ..compressor import Message, check_buffer
from ..layout import BufferLayout
from ..residual import add_residual
from ..state import CompressorState
from ..validation import CorruptMessageError, refusing_corrupt
from .base import Sparsifier, check_numbers, check_values, propagate_nonfinite_
from .permutation import Order, Permutation

Sketch = TypeVar("Sketch", bound="PermutationSketch")


class PermutationSketch(Sparsifier):
    """A rank sends its share of the entries, and no other rank does.

    All ranks draw one permutation for each message, and a message holds one part of it, times the
    number of ranks and weighed: in the mean over ranks each entry is that of one rank, weighed.
    """

    @property
    @abc.abstractmethod
    def permutation(self) -> Permutation:
        """How it is drawn who says which entries."""

    @abc.abstractmethod
    def num_shares(self) -> int:
        """How many shares a message on its own is one of.

        Raises:
            ValueError: nobody has said.
        """

    @abc.abstractmethod
    def for_num_ranks(self: Sketch, num_ranks: int) -> Sketch:
        """This one, for means over so many ranks.

        Raises:
            ValueError: it does not serve so many.
        """

    @abc.abstractmethod
    def precondition_(self, values: Tensor, order: Order, state: CompressorState) -> None:
        """Multiply a share's values by what stands before them in a mean over ranks.

        Args:
            values: of this rank's share, as long as it is. Written.
            order: the draw.
            state: of the buffer.
        """

    def compress(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None
    ) -> Message:
        """As `Compressor.compress`: (values in x's dtype, (2,) int64: the draw and the share).

        Values are as many as the longest share has, whichever this one is.

        Raises:
            ValueError: the number of ranks has not been said.
        """
        num_shares = self.num_shares()
        order, values = self._draw(x, state, num_shares, residual)
        if residual is None:
            self.precondition_(values, order, state)
            values.mul_(num_shares)
        values = _pad(values, order.longest)
        numbers = torch.tensor([state.step, order.share_of(state.rank)], device=x.device)
        return values, numbers

    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        """As `Compressor.decompress`; on GPUs the host waits for the message's numbers."""
        num_shares = self.num_shares()
        with refusing_corrupt():
            values, numbers = message
            check_values(values, self.num_values((numbers,), layout))
        step, share = numbers.tolist()
        order = self.permutation.draw(layout, step, num_shares, out.device)
        values = values[: order.length(share)]
        if accumulate:
            values = order.take(out, share).add_(values)
        else:
            out.zero_()
        order.put_(out, values, share)
        return out

    def mean_(
        self,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Tensor | None = None,
    ) -> None:
        """As `Compressor.mean_`, in as many shares as there are ranks."""
        with collectives.stats.encoding():
            sketch = self.for_num_ranks(collectives.size)
            order, values = sketch._draw(x, state, collectives.size, residual)
            if residual is None:
                sketch.precondition_(values, order, state)
        gathered = collectives.all_gather(_pad(values, order.longest))
        with collectives.stats.decoding():
            for row, share in zip(
                gathered, map(order.share_of, range(collectives.size)), strict=True
            ):
                order.put_(x, row[: order.length(share)], share)
            if residual is not None:
                x.div_(collectives.size)

    def num_values(self, where: Message, layout: BufferLayout) -> int:
        """As `Sparsifier.num_values`."""
        (numbers,) = where
        check_numbers(numbers, 2)
        share, num_shares = int(numbers[1]), self.num_shares()
        if not 0 <= share < num_shares:
            raise CorruptMessageError(f"got share {share} of {num_shares}")
        return self.permutation.shares(layout.numel, num_shares).longest

    def _draw(
        self, x: Tensor, state: CompressorState, num_shares: int, residual: Tensor | None
    ) -> tuple[Order, Tensor]:
        """This message's order, and this rank's share of x, in x's dtype."""
        check_buffer(x, state.layout)
        if residual is not None and not self.takes_residual:
            raise ValueError(f"residual must be None where {self} sends, got a tensor")
        state.step += 1
        order = self.permutation.draw(state.layout, state.step, num_shares, x.device)
        share = order.share_of(state.rank)
        if residual is None:
            return order, propagate_nonfinite_(order.take(x, share), x)
        total = add_residual(x, residual)
        chosen = order.take(total, share)
        values = chosen.to(x.dtype, copy=True)
        residual.copy_(total)
        order.put_(residual, chosen.sub_(values), share)
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return order, propagate_nonfinite_(values, x)


def _pad(values: Tensor, length: int) -> Tensor:
    if values.numel() == length:
        return values
    padded = values.new_zeros(length)
    padded[: values.numel()] = values
    return padded
