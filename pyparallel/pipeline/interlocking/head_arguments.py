"""Validation of the arguments of heads."""

from torch import nn


def check_num_outputs(num_outputs: object) -> None:
    """Check the number of outputs.

    Raises:
        ValueError: it is not a positive integer.
    """
    if not _is_size(num_outputs):
        raise ValueError(f"num_outputs must be a positive integer, got {num_outputs!r}")


def check_channels(channels: object) -> None:
    """Check the channels of convolutions.

    Raises:
        ValueError: it is not a tuple of positive integers.
    """
    if not isinstance(channels, tuple) or not channels or not all(map(_is_size, channels)):
        raise ValueError(
            "channels must be a tuple of positive integers, one for each convolution, got "
            f"{channels!r}"
        )


def check_norm(norm: object) -> None:
    """Check the class of a normalization, whose name is the same on all ranks.

    Raises:
        ValueError: it is neither None nor a subclass of ``nn.Module``.
    """
    if norm is not None and not (isinstance(norm, type) and issubclass(norm, nn.Module)):
        raise ValueError(
            f"norm must be a class of modules such as nn.LayerNorm, or None, got {norm!r}"
        )


def name_of(norm: type[nn.Module] | None) -> str:
    """Return the name of a class for a ``repr``."""
    return "None" if norm is None else norm.__name__


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
