"""The pieces of a buffer that are worth a low-rank factorization, and where they lie."""

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, count, takewhile

from torch import Tensor

from ..layout import BufferLayout, Piece


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape at even spacing in a buffer, for one batched kernel."""

    names: tuple[str, ...]
    offset: int  # of the first matrix
    spacing: int  # between the offsets of two matrices
    rows: int
    columns: int  # the product of all dimensions but the first
    rank: int  # columns of the left factor, rows of the right factor

    @property
    def count(self) -> int:
        """Number of matrices."""
        return len(self.names)

    @property
    def left(self) -> tuple[int, int, int]:
        """Shape of the left factors."""
        return self.count, self.rows, self.rank

    @property
    def right(self) -> tuple[int, int, int]:
        """Shape of the right factors, stored by rows."""
        return self.count, self.rank, self.columns

    def view(self, flat: Tensor) -> Tensor:
        """Return the matrices as a view of the buffer: (count, rows, columns)."""
        return flat.as_strided(
            (self.count, self.rows, self.columns),
            (self.spacing, self.columns, 1),
            flat.storage_offset() + self.offset,
        )

    def singly(self) -> "Iterator[Batch]":
        """Yield each matrix as a batch of its own."""
        for index, name in enumerate(self.names):
            yield replace(self, names=(name,), offset=self.offset + index * self.spacing)


@dataclass(frozen=True)
class Matrices:
    """The matrices of a buffer, and the spans of all other entries."""

    batches: tuple[Batch, ...]  # to factorize
    spans: tuple[tuple[int, int], ...]  # (begin, end) of vectors, and of too small matrices

    @staticmethod
    @lru_cache(maxsize=1024)  # one per buffer, looked up in every step
    def of(layout: BufferLayout, rank: int, min_ratio: float, *, singly: bool) -> "Matrices":
        """Return the matrices of a buffer with factors of a rank, at most the smaller dimension.

        A matrix is factorized if its factors have fewer entries by more than ``min_ratio``.
        ``singly`` lets every batch be one matrix, in the same order.
        """
        placed = list(zip(layout.offsets, layout.pieces, strict=True))
        chosen = [(at, each) for at, each in placed if _saves(each, rank, min_ratio)]
        shapes = dict.fromkeys(_shape(piece) for _, piece in chosen)
        batches = [
            batch
            for shape in shapes
            for batch in _batches(
                {at: p.name for at, p in chosen if _shape(p) == shape}, *shape, rank
            )
        ]
        if singly:
            batches = [one for each in batches for one in each.singly()]
        others = [(at, piece.numel) for at, piece in placed if not _saves(piece, rank, min_ratio)]
        return Matrices(tuple(batches), tuple(_spans(others)))

    @cached_property
    def names(self) -> list[str]:
        """Names of all matrices, in the order of their factors."""
        return [name for batch in self.batches for name in batch.names]

    @cached_property
    def num_left(self) -> int:
        """Entries of all left factors."""
        return sum(math.prod(batch.left) for batch in self.batches)

    @cached_property
    def num_right(self) -> int:
        """Entries of all right factors."""
        return sum(math.prod(batch.right) for batch in self.batches)

    @cached_property
    def num_others(self) -> int:
        """Number of uncompressed entries."""
        return sum(end - begin for begin, end in self.spans)

    def lefts(self, flat: Tensor) -> list[Tensor]:
        """Return views of the left factors of each batch in a buffer of all left factors."""
        return _split(flat, [batch.left for batch in self.batches])

    def rights(self, flat: Tensor) -> list[Tensor]:
        """Return views of the right factors of each batch in a buffer of all right factors."""
        return _split(flat, [batch.right for batch in self.batches])

    def others(self, flat: Tensor) -> list[Tensor]:
        """Return views of the uncompressed spans of a whole buffer."""
        return [flat[begin:end] for begin, end in self.spans]

    def split_others(self, flat: Tensor) -> list[Tensor]:
        """Return views of the spans in a buffer of uncompressed entries only."""
        return list(flat.split([end - begin for begin, end in self.spans]))


def _saves(piece: Piece, rank: int, min_ratio: float) -> bool:
    if len(piece.shape) < 2:
        return False
    rows, columns = _shape(piece)
    return (rows + columns) * min(rank, rows, columns) * min_ratio < rows * columns


def _shape(piece: Piece) -> tuple[int, int]:
    return piece.shape[0], math.prod(piece.shape[1:])


def _batches(names: dict[int, str], rows: int, columns: int, rank: int) -> Iterator[Batch]:
    """Yield all matrices of a shape by offset, in the longest evenly spaced batches."""
    left = dict(sorted(names.items()))
    while left:
        first, *others = left
        runs = [_run(left, first, other - first) for other in others]
        run = max(runs, key=len, default=[first])
        spacing = run[1] - first if others else rows * columns
        batch_names = tuple(left.pop(offset) for offset in run)
        yield Batch(batch_names, first, spacing, rows, columns, min(rank, rows, columns))


def _run(offsets: Container[int], first: int, spacing: int) -> list[int]:
    return list(takewhile(offsets.__contains__, count(first, spacing)))


def _spans(placed: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) with adjacent pieces joined."""
    begin = end = 0
    for offset, numel in placed:
        if offset != end:
            if end > begin:
                yield begin, end
            begin = offset
        end = offset + numel
    if end > begin:
        yield begin, end


def _split(flat: Tensor, shapes: list[tuple[int, int, int]]) -> list[Tensor]:
    ends = accumulate(math.prod(shape) for shape in shapes)
    return [
        flat[end - math.prod(shape) : end].view(shape)
        for end, shape in zip(ends, shapes, strict=True)
    ]
