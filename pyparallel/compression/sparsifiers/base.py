"""Base class of compressors that send some of a buffer's entries."""

import abc

import torch
from torch import Tensor

from ...ops import FLOAT_DTYPES
from ..compressor import Compressor, Message
from ..corrupt_messages import CorruptMessageError
from ..layout import BufferLayout


class Sparsifier(Compressor):
    """A compressor whose message is values, then tensors that locate them; `Chain` builds on it."""

    @abc.abstractmethod
    def num_values(self, where: Message, layout: BufferLayout) -> int:
        """Return the number of values of a message from its other tensors.

        Args:
            where: the message without its values. Not trusted.
            layout: layout of the buffer.

        Raises:
            CorruptMessageError: ``compress`` cannot have made the message.
        """


def check_values(values: Tensor, count: int) -> None:
    """Check that a message's values are (count,) floats.

    Raises:
        CorruptMessageError: another shape or dtype.
    """
    if values.shape != (count,) or values.dtype not in FLOAT_DTYPES:
        raise CorruptMessageError(
            f"values must be {count} floats, got shape {list(values.shape)} of {values.dtype}"
        )


def check_numbers(numbers: Tensor, count: int) -> None:
    """Check for (count,) non-negative int64 numbers; on GPUs values are not read.

    Raises:
        CorruptMessageError: another shape or dtype; on the CPU, a negative number.
    """
    fits = numbers.shape == (count,) and numbers.dtype == torch.int64
    if not fits or (numbers.device.type == "cpu" and bool((numbers < 0).any())):
        raise CorruptMessageError(
            f"numbers must be {count} non-negative int64, got shape {list(numbers.shape)} of "
            f"{numbers.dtype}"
        )


def propagate_nonfinite_(values: Tensor, x: Tensor) -> Tensor:
    """Set all values to nan if any entry of x, sent or not, is nan or infinite.

    Args:
        values: (k,) floats. Written and returned.
        x: (numel,) floats.
    """
    if x.numel() and values.numel():
        least, most = x.aminmax()
        values.add_((least * 0 + most * 0).to(values.dtype))
    return values
