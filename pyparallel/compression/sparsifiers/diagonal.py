"""A positive number for each entry of a buffer, by parameter name."""

import hashlib
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from ..layout import BufferLayout, Piece


class Diagonal:
    """The diagonal of a positive definite matrix, such as ``Diagonal({"*.bias": 2.0, "*": D})``.

    The first pattern that matches a parameter's name counts. It is printed, and compared, with its
    tensors by shape and a digest of their values, so that ranks find out whether theirs are alike;
    with numbers alone, what is printed makes it again.

    Args:
        values: by pattern of `fnmatch`, which minds case: numbers above 0, or tensors of them that
            `torch.broadcast_to` brings to the parameter's shape. Copied, in float64.

    Raises:
        ValueError: no pattern, or a value that is not finite and above 0.
    """

    def __init__(self, values: Mapping[str, float | Tensor]) -> None:
        if not values:
            raise ValueError('values must not be empty, got {}; use {"*": tensor}')
        self._values = {pattern: _positive(pattern, value) for pattern, value in values.items()}
        parts = ", ".join(f"{pattern!r}: {_show(each)}" for pattern, each in self._values.items())
        self._text = f"Diagonal({{{parts}}})"

    def __repr__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Diagonal) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def of(self, layout: BufferLayout) -> Tensor:
        """What belongs to each entry of a buffer, (numel,) float64 on the CPU.

        Raises:
            ValueError: a parameter that no pattern matches, or that what it matches does not fit.
        """
        parts = [self._of_piece(piece).reshape(-1) for piece in layout.pieces]
        return torch.cat([torch.empty(0, dtype=torch.float64), *parts])

    def _of_piece(self, piece: Piece) -> Tensor:
        for pattern, value in self._values.items():
            if fnmatchcase(piece.name, pattern):
                return _fit(value, pattern, piece)
        raise ValueError(
            f"diagonal must have a pattern for every parameter, got none for {piece.name!r} in "
            f'{self}; add "*" as the last'
        )


def _positive(pattern: str, value: float | Tensor) -> Tensor:
    copy = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach().clone()
    if not bool(((copy > 0) & copy.isfinite()).all()):
        raise ValueError(
            f"values must be finite and above 0, got {_first_bad(copy):g} for {pattern!r}; a "
            "damping term added to all of them keeps flat directions in reach"
        )
    return copy


def _first_bad(values: Tensor) -> float:
    return float(values[~((values > 0) & values.isfinite())].flatten()[0])


def _show(value: Tensor) -> str:
    if value.dim() == 0:
        return repr(float(value))
    digest = hashlib.sha256(value.numpy().tobytes()).hexdigest()
    return f"<{list(value.shape)} {digest[:16]}>"


def _fit(value: Tensor, pattern: str, piece: Piece) -> Tensor:
    try:
        return value.broadcast_to(piece.shape)
    except RuntimeError as error:
        raise ValueError(
            f"diagonal must fit the parameters, got {list(value.shape)} for {pattern!r} where "
            f"{piece.name} is of shape {list(piece.shape)}"
        ) from error
