"""Diagonal matrices: a positive number per entry of a buffer, by parameter name."""

import hashlib
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from ...training.arguments import require
from ..layout import BufferLayout, Piece


class Diagonal:
    """The diagonal of a positive definite matrix, such as ``Diagonal({"*.bias": 2.0, "*": D})``.

    The first pattern that matches a parameter's name applies. The repr and equality use the shape
    and a digest of tensors, so that ranks can check that theirs are the same; the repr of numbers
    alone evaluates to an equal object.

    Args:
        values: positive numbers by pattern of `fnmatch` (case-sensitive), or tensors of them that
            `torch.broadcast_to` the parameter's shape. Copied, in float64.

    Raises:
        ValueError: no pattern, or a value that is not finite and positive.
    """

    def __init__(self, values: Mapping[str, float | Tensor]) -> None:
        require(values, "values must not be empty", "{}", 'use {"*": tensor}')
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
        """Return the diagonal of a buffer, (numel,) float64 on the CPU.

        Raises:
            ValueError: no pattern matches a parameter, or its value does not fit the shape.
        """
        parts = [self._of_piece(piece).reshape(-1) for piece in layout.pieces]
        return torch.cat([torch.empty(0, dtype=torch.float64), *parts])

    def _of_piece(self, piece: Piece) -> Tensor:
        for pattern, value in self._values.items():
            if fnmatchcase(piece.name, pattern):
                return _fit(value, pattern, piece)
        raise ValueError(
            f"diagonal must have a pattern for every parameter, got none for {piece.name!r} in "
            f'{self}; add "*" as the last pattern'
        )


def _positive(pattern: str, value: float | Tensor) -> Tensor:
    copy = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach().clone()
    if not bool(((copy > 0) & copy.isfinite()).all()):
        raise ValueError(
            f"values must be finite and > 0, got {_first_bad(copy):g} for {pattern!r}; add a "
            "damping term to all of them"
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
            f"diagonal must fit the parameters, got {list(value.shape)} for {pattern!r}, but "
            f"{piece.name} has shape {list(piece.shape)}"
        ) from error
