"""Perm-K with a diagonal preconditioner, for the theory of independent subnet training."""

import abc
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from ...training.arguments import wrong_type
from ..compressor import AttachPoint
from ..layout import BufferLayout
from ..state import CompressorState
from .diagonal import Diagonal
from .perm_k import check_num_ranks, require_num_ranks
from .permutation import Order, Permutation
from .permutation_sketch import PermutationSketch
from .random_k import check_run_length

_INVERSE_ROOT = "inverse_root"


class _Preconditioned(PermutationSketch):
    """Perm-K times the inverse square roots of a diagonal."""

    seed: int
    run_length: int
    takes_residual = False  # the decoded message does not approximate the input

    @abc.abstractmethod
    def _diagonal(self, rank: int) -> Diagonal:
        """Return the diagonal of a rank."""

    @property
    @override
    def permutation(self) -> Permutation:
        return Permutation(self.seed, self.run_length)

    @override
    def validation_error(self, place: AttachPoint) -> str | None:
        """Return why it cannot be attached anywhere but to DDP, or None."""
        if place is AttachPoint.DDP:
            return None
        return (
            f"compressor must decode to an approximation of its input for {place.value}, got "
            f"{self}, which preconditions; use PermK(num_ranks=...)"
        )

    @override
    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        """Return a state with the inverse roots of the diagonal, 4 bytes an entry.

        Raises:
            ValueError: the diagonal does not fit the buffer.
        """
        root = self._diagonal(rank).of(layout).rsqrt().to(device, torch.float32)
        return CompressorState(layout, rank, hints={_INVERSE_ROOT: root})

    @override
    def precondition_(self, values: Tensor, order: Order, state: CompressorState) -> None:
        """Multiply by the inverse roots."""
        values.mul_(order.take(state.hints[_INVERSE_ROOT], order.share_of(state.rank)))


@dataclass(frozen=True)
class ScaledPermK(_Preconditioned):
    """`PermK` after a diagonal preconditioner shared by all ranks (Shulgin and Richtarik).

    Sketch i is ``n D^(-1/2)`` on the i-th of n shares: the Perm-q sketch for the problem in ``y =
    D^(1/2) x``, whose curvature has a unit diagonal (arXiv 2306.16484). The mean over ranks decodes
    to ``D^(-1/2)`` times one rank's entry each, so it is biased as a compressor and has no
    residual. The bytes are those of `PermK`.

    Args:
        diagonal: D, such as the diagonal of the mean curvature; the same on all ranks.
        seed: as in `PermK`.
        num_ranks: as in `PermK`.
        run_length: as in `PermK`.
    """

    diagonal: Diagonal
    seed: int = 0
    num_ranks: int | None = None
    run_length: int = 32

    def __post_init__(self) -> None:
        _check_diagonal(self.diagonal)
        check_run_length(self.run_length)
        check_num_ranks(self.num_ranks)

    @override
    def num_shares(self) -> int:
        return require_num_ranks(self.num_ranks, "ScaledPermK(diagonal, num_ranks=...)")

    @override
    def for_num_ranks(self, num_ranks: int) -> "ScaledPermK":
        return replace(self, num_ranks=num_ranks)

    @override
    def _diagonal(self, rank: int) -> Diagonal:
        return self.diagonal


@dataclass(frozen=True)
class HeterogeneousPermK(_Preconditioned):
    """`PermK` with a diagonal preconditioner per rank (Shulgin and Richtarik).

    Sketch i is ``sqrt(n) D_i^(-1/2)`` on the i-th of n shares, D_i the diagonal of rank i's
    curvature: if shares are single entries, the mean of ``C_i L_i C_i`` is the identity (arXiv
    2306.16484, section 4). It is biased as a compressor and has no residual. The bytes are those of
    `PermK`.

    Args:
        diagonals: D_i by rank, all of them on all ranks; a smaller group uses the first ones.
        seed: as in `PermK`.
        run_length: as in `PermK`.
    """

    diagonals: tuple[Diagonal, ...]
    seed: int = 0
    run_length: int = 32

    def __post_init__(self) -> None:
        if not isinstance(self.diagonals, tuple):
            raise wrong_type("diagonals", "a tuple of one Diagonal per rank", self.diagonals)
        if not self.diagonals:
            raise ValueError("diagonals must be a tuple of one Diagonal per rank, got an empty one")
        for diagonal in self.diagonals:
            _check_diagonal(diagonal)
        check_run_length(self.run_length)

    @override
    def num_shares(self) -> int:
        """Return the number of diagonals."""
        return len(self.diagonals)

    @override
    def for_num_ranks(self, num_ranks: int) -> "HeterogeneousPermK":
        if num_ranks > len(self.diagonals):
            raise ValueError(
                f"diagonals must be one for each of {num_ranks} ranks, got {len(self.diagonals)}"
            )
        return replace(self, diagonals=self.diagonals[:num_ranks])

    @override
    def precondition_(self, values: Tensor, order: Order, state: CompressorState) -> None:
        """Multiply by this rank's inverse roots, and by that of the number of ranks."""
        super().precondition_(values, order, state)
        values.div_(order.num_ranks**0.5)

    @override
    def _diagonal(self, rank: int) -> Diagonal:
        if rank >= len(self.diagonals):
            raise ValueError(
                f"diagonals must be one for each rank, got {len(self.diagonals)} on rank {rank}"
            )
        return self.diagonals[rank]


def _check_diagonal(diagonal: object) -> None:
    if not isinstance(diagonal, Diagonal):
        raise wrong_type("diagonal", 'an object such as Diagonal({"*": 2.0})', diagonal)
