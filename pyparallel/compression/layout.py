"""What lies where in a flat buffer, by parameter name: states outlive the buffers they began in."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """A parameter's place in a buffer: its name and shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many entries of the buffer are its."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class BufferLayout:
    """The pieces of a flat buffer, one after another without gaps."""

    pieces: tuple[Piece, ...]

    @classmethod
    def flat(cls, numel: int, name: str = "buffer") -> "BufferLayout":
        """Of a buffer whose inside is nobody's business."""
        return cls((Piece(name, (numel,)),))

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor]]) -> "BufferLayout":
        """Of tensors laid one after another."""
        return cls(tuple(Piece(name, tuple(tensor.shape)) for name, tensor in named))

    @cached_property
    def numel(self) -> int:
        """The length of the buffer."""
        return sum(piece.numel for piece in self.pieces)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the pieces, in order."""
        return tuple(piece.name for piece in self.pieces)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each piece begins."""
        return tuple(accumulate((piece.numel for piece in self.pieces), initial=0))[:-1]

    def split(self, flat: Tensor) -> list[Tensor]:
        """Each piece of a buffer, in its shape: views."""
        return [
            flat.narrow(0, offset, piece.numel).view(piece.shape)
            for offset, piece in zip(self.offsets, self.pieces, strict=True)
        ]
