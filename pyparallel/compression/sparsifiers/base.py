"""Base class of compressors that send some of a buffer's entries."""

import abc

import torch
from torch import Tensor
from typing_extensions import override

from ... import ops
from ...ops import FLOAT_DTYPES
from ...training.arguments import summarize
from ..compressor import Compressor, Message
from ..corrupt_messages import CorruptMessageError, refusing_corrupt
from ..layout import BufferLayout


class Sparsifier(Compressor):
    """A compressor whose message is values, then tensors that locate them; `Chain` builds on it."""

    @abc.abstractmethod
    def num_values(self, where: Message, layout: BufferLayout) -> int:
        """Return the number of values of a message from its other tensors, ``where``.

        They are not trusted: a CorruptMessageError if ``compress`` cannot have made them.
        """


class IndexSparsifier(Sparsifier):
    """A sparsifier whose message is the values and the ascending indices of any entries."""

    @override
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        return add_at_indices(message, out, accumulate)

    @override
    def num_values(self, where: Message, layout: BufferLayout) -> int:
        (indices,) = where
        return indices.numel()


def add_at_indices(message: Message, out: Tensor, accumulate: bool) -> Tensor:
    """Write a message's values at its indices, or add them there; other entries become 0."""
    with refusing_corrupt():
        values, indices = message
        if accumulate:
            return ops.scatter_add_(out, values, indices)
        # Not into out, which a corrupt message must leave unchanged.
        return out.copy_(ops.scatter_add_(torch.zeros_like(out), values, indices))


def check_values(values: Tensor, count: int) -> None:
    """Raise a CorruptMessageError unless a message's values are (count,) floats."""
    if values.shape != (count,) or values.dtype not in FLOAT_DTYPES:
        raise CorruptMessageError(f"values must be {count} floats, got {summarize(values)}")


def check_numbers(numbers: Tensor, count: int) -> None:
    """Raise a CorruptMessageError unless numbers are (count,) non-negative int64, read on CPUs."""
    fits = numbers.shape == (count,) and numbers.dtype == torch.int64
    if not fits or (numbers.device.type == "cpu" and bool((numbers < 0).any())):
        rule = f"numbers must be {count} non-negative int64"
        raise CorruptMessageError(f"{rule}, got {summarize(numbers)}")


def propagate_nonfinite_(values: Tensor, x: Tensor) -> Tensor:
    """Set all values to nan if any entry of x, sent or not, is nan or infinite; return them."""
    if x.numel() and values.numel():
        least, most = x.aminmax()
        values.add_((least * 0 + most * 0).to(values.dtype))
    return values
