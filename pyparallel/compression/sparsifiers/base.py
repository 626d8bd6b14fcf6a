"""Compressors that send some of a buffer's entries as they are."""

import abc

import torch
from torch import Tensor

from ...ops import FLOAT_DTYPES
from ..compressor import Compressor, Message
from ..layout import BufferLayout
from ..validation import CorruptMessageError


class Sparsifier(Compressor):
    """A message is values, and then what says which entries they are: what `Chain` builds on."""

    @abc.abstractmethod
    def num_values(self, where: Message, layout: BufferLayout) -> int:
        """How many values a message has, going by the rest of it.

        Args:
            where: a message but for its values. Not trusted.
            layout: of the buffer.

        Raises:
            CorruptMessageError: what cannot have come from ``compress``.
        """


def check_values(values: Tensor, count: int) -> None:
    """Refuse a message's values where they are not so many floats.

    Raises:
        CorruptMessageError: another shape or dtype.
    """
    if values.shape != (count,) or values.dtype not in FLOAT_DTYPES:
        raise CorruptMessageError(
            f"got values {list(values.shape)} of {values.dtype} where {count} floats belong"
        )


def check_numbers(numbers: Tensor, count: int) -> None:
    """Refuse what are not so many whole numbers, from 0 up; elsewhere than on the CPU unread.

    Raises:
        CorruptMessageError: another shape or dtype; on the CPU, a negative number.
    """
    fits = numbers.shape == (count,) and numbers.dtype == torch.int64
    if not fits or (numbers.device.type == "cpu" and bool((numbers < 0).any())):
        raise CorruptMessageError(
            f"got {list(numbers.shape)} of {numbers.dtype} where {count} whole numbers from 0 up "
            "belong"
        )


def propagate_nonfinite_(values: Tensor, x: Tensor) -> Tensor:
    """Make all values nan if any entry of x, sent or not, is nan or infinite.

    Args:
        values: (k,) floats. Written, and returned.
        x: (numel,) floats.
    """
    if x.numel() and values.numel():
        least, most = x.aminmax()
        values.add_((least * 0 + most * 0).to(values.dtype))
    return values
