"""Base class of compressors that send shares of a random permutation."""

import abc
from typing import TypeVar

from torch import Tensor
from typing_extensions import override

from ...comm.collectives import Collectives, int64_on
from ..compressor import Message
from ..corrupt_messages import CorruptMessageError, refusing_corrupt
from ..layout import BufferLayout
from ..residual import add_residual
from ..state import CompressorState
from .base import Sparsifier, check_numbers, check_values, propagate_nonfinite_
from .permutation import Order, Permutation

Sketch = TypeVar("Sketch", bound="PermutationSketch")


class PermutationSketch(Sparsifier):
    """A compressor with which each rank sends its own share of the entries.

    All ranks draw one permutation per message, and a message is one part of it, preconditioned and
    times the number of ranks: in the mean over ranks each entry is that of one rank,
    preconditioned.
    """

    @property
    @abc.abstractmethod
    def permutation(self) -> Permutation:
        """How the permutation is drawn."""

    @abc.abstractmethod
    def num_shares(self) -> int:
        """Return the number of shares for a single message.

        Raises:
            ValueError: it is not set.
        """

    @abc.abstractmethod
    def for_num_ranks(self: Sketch, num_ranks: int) -> Sketch:
        """Return this compressor for means over that many ranks.

        Raises:
            ValueError: it does not support that many.
        """

    @abc.abstractmethod
    def precondition_(self, values: Tensor, order: Order, state: CompressorState) -> None:
        """Multiply the values of this rank's share by their factors in a mean over ranks."""

    @override
    def compress(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None
    ) -> Message:
        """Return (values in x's dtype, (2,) int64: step and share).

        Values are zero-padded to the length of the longest share.

        Raises:
            ValueError: the number of ranks is not set.
        """
        num_shares = self.num_shares()
        order, values = self._draw(x, state, num_shares, residual)
        if residual is None:
            self.precondition_(values, order, state)
            values.mul_(num_shares)
        values = _pad(values, order.longest)
        numbers = int64_on(x.device, [state.step, order.share_of(state.rank)])
        return values, numbers

    @override
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        """Decode a message; on GPUs the host waits for its step and share."""
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

    @override
    def mean_(
        self,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Tensor | None = None,
    ) -> None:
        """Average with as many shares as there are ranks."""
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

    @override
    def num_values(self, where: Message, layout: BufferLayout) -> int:
        (numbers,) = where
        check_numbers(numbers, 2)
        share, num_shares = int(numbers[1]), self.num_shares()
        if not 0 <= share < num_shares:
            raise CorruptMessageError(f"share must be in [0, {num_shares}), got {share}")
        return self.permutation.shares(layout.numel, num_shares).longest

    def _draw(
        self, x: Tensor, state: CompressorState, num_shares: int, residual: Tensor | None
    ) -> tuple[Order, Tensor]:
        """Return this message's permutation, and this rank's share of x, in x's dtype."""
        if residual is not None and not self.takes_residual:
            raise ValueError(f"residual must be None for {self}, got a tensor")
        state.begin_message(x)
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
