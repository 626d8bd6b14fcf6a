"""Layout of a flat buffer by parameter name, by which state follows parameters to other buffers."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from ..ops import FLOAT_DTYPES


@dataclass(frozen=True)
class Piece:
    """A parameter in a flat buffer: its name and shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class BufferLayout:
    """The pieces of a flat buffer, contiguous and in order.

    ``name``, if given, seeds its random draws, whichever pieces it has; else their names do.
    """

    pieces: tuple[Piece, ...]
    name: str | None = None

    @classmethod
    @lru_cache(1024)
    def flat(cls, numel: int, name: str = "buffer") -> "BufferLayout":
        """Return the layout of a buffer that is one piece."""
        return cls((Piece(name, (numel,)),))

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor]]) -> "BufferLayout":
        """Return the layout of named tensors, concatenated."""
        return cls(tuple(Piece(name, tuple(tensor.shape)) for name, tensor in named))

    def __hash__(self) -> int:
        """Return a hash that is computed once: layouts are keys in every step."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.pieces)

    @cached_property
    def numel(self) -> int:
        """Length of the buffer."""
        return sum(piece.numel for piece in self.pieces)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the pieces, in order."""
        return tuple(piece.name for piece in self.pieces)

    @property
    def seed_names(self) -> tuple[str, ...]:
        """What the random draws of the buffer depend on."""
        return self.names if self.name is None else (self.name,)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each piece."""
        return tuple(accumulate((piece.numel for piece in self.pieces), initial=0))[:-1]

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return a view of each piece of a buffer, in its shape."""
        return [
            flat.narrow(0, offset, piece.numel).view(piece.shape)
            for offset, piece in zip(self.offsets, self.pieces, strict=True)
        ]

    def check(self, x: Tensor) -> None:
        """Raise a ValueError unless x is a dense flat buffer of this length and a float dtype."""
        if x.layout is not torch.strided:
            raise ValueError(
                f"gradients must be dense, got sparse ones of {', '.join(self.names[:3])}; "
                "use Embedding(sparse=False)"
            )
        if x.dim() != 1 or not x.is_contiguous() or x.numel() != self.numel:
            raise ValueError(
                f"x must be a contiguous buffer of {self.numel} entries, got shape "
                f"{list(x.shape)} and strides {list(x.stride())}"
            )
        if x.dtype not in FLOAT_DTYPES:
            raise ValueError(
                "compression supports float32, bfloat16 and float16 only, got "
                f"{x.dtype} (parameters {', '.join(self.names[:3])})"
            )


@dataclass(frozen=True)
class Entries:
    """Some pieces of a flat buffer as one buffer: its layout, and as few contiguous runs.

    A run is its begin in the flat buffer and its length.
    """

    layout: BufferLayout
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, pieces: Sequence[Piece], offsets: Sequence[int]) -> "Entries":
        """Return those of pieces at ascending offsets."""
        runs: list[tuple[int, int]] = []
        for piece, begin in zip(pieces, offsets, strict=True):
            if runs and sum(runs[-1]) == begin:
                runs[-1] = runs[-1][0], runs[-1][1] + piece.numel
            else:
                runs.append((begin, piece.numel))
        return cls(BufferLayout(tuple(pieces)), tuple(runs))

    def is_whole(self, layout: BufferLayout) -> bool:
        """Return whether these are all pieces of a buffer."""
        return self.layout == layout

    def read(self, flat: Tensor) -> Tensor:
        """Return the entries as one buffer: a view if they are contiguous."""
        if len(self.runs) <= 1:
            begin, numel = self.runs[0] if self.runs else (0, 0)
            return flat.narrow(0, begin, numel)
        return torch.cat([flat.narrow(0, *run) for run in self.runs])

    def write(self, flat: Tensor, values: Tensor) -> None:
        """Copy values back to where they were read."""
        parts = values.split([numel for _, numel in self.runs]) if self.runs else ()
        for run, part in zip(self.runs, parts, strict=True):
            flat.narrow(0, *run).copy_(part)

    @contextmanager
    def open(self, flat: Tensor) -> Iterator[Tensor]:
        """Yield the entries as one buffer that may be written."""
        values = self.read(flat)
        yield values
        if len(self.runs) > 1:  # else they are a view
            self.write(flat, values)

    def open_if_any(self, flat: Tensor | None) -> AbstractContextManager[Tensor | None]:
        """Return ``open`` of a buffer that may be None."""
        return nullcontext() if flat is None else self.open(flat)
