"""Shares of a permutation that are preconditioned, as the theory of subnetworks needs them."""

import abc
from dataclasses import dataclass, replace

import torch
from torch import Tensor

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
    """A share, times the inverse square roots of a diagonal."""

    seed: int
    run_length: int

    @abc.abstractmethod
    def _diagonal(self, rank: int) -> Diagonal:
        """Whose inverse roots a rank's share is multiplied by."""

    @property
    def unbiased(self) -> bool:
        """No: in expectation what is decoded is preconditioned."""
        return False

    @property
    def takes_residual(self) -> bool:
        """No: what it decodes to is not meant to be near to what it was given."""
        return False

    @property
    def permutation(self) -> Permutation:
        """As `PermutationSketch.permutation`."""
        return Permutation(self.seed, self.run_length)

    def validation_error(self, place: AttachPoint) -> str | None:
        """It serves gradients that know their names, and whoever may read them scaled."""
        if place is AttachPoint.DDP:
            return None
        return (
            f"compressor must decode to what it was given where it serves {place.value}, got "
            f"{self}, which preconditions; use PermK(num_ranks=...)"
        )

    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        """With the inverse roots of the diagonal, 4 bytes an entry.

        Raises:
            ValueError: a diagonal that does not fit the buffer.
        """
        root = self._diagonal(rank).of(layout).rsqrt().to(device, torch.float32)
        return CompressorState(layout, rank, hints={_INVERSE_ROOT: root})

    def precondition_(self, values: Tensor, order: Order, state: CompressorState) -> None:
        """By the inverse roots."""
        values.mul_(order.take(state.hints[_INVERSE_ROOT], order.share_of(state.rank)))


@dataclass(frozen=True)
class ScaledPermK(_Preconditioned):
    """`PermK` after one diagonal preconditioner that all ranks share (Shulgin and Richtarik).

    Sketch i is ``n D^(-1/2)`` on the i-th of n shares: that of the Perm-q sketch for the problem in
    ``y = D^(1/2) x``, whose curvature has a diagonal of ones (arXiv 2306.16484). The mean over
    ranks decodes to ``D^(-1/2)`` of one rank's entry each, so it is biased as a compressor, and
    has no residual. The bytes are those of `PermK`.

    Args:
        diagonal: D, such as the diagonal of the mean curvature; the same on all ranks.
        seed: as of `PermK`.
        num_ranks: as of `PermK`.
        run_length: as of `PermK`.
    """

    diagonal: Diagonal
    seed: int = 0
    num_ranks: int | None = None
    run_length: int = 32

    def __post_init__(self) -> None:
        _check_diagonal(self.diagonal)
        check_run_length(self.run_length)
        check_num_ranks(self.num_ranks)

    def num_shares(self) -> int:
        """As `PermutationSketch.num_shares`."""
        return require_num_ranks(self.num_ranks, "ScaledPermK(diagonal, num_ranks=...)")

    def for_num_ranks(self, num_ranks: int) -> "ScaledPermK":
        """As `PermutationSketch.among`."""
        return replace(self, num_ranks=num_ranks)

    def _diagonal(self, rank: int) -> Diagonal:
        return self.diagonal


@dataclass(frozen=True)
class HeterogeneousPermK(_Preconditioned):
    """`PermK` with a diagonal preconditioner of each rank's own (Shulgin and Richtarik).

    Sketch i is ``sqrt(n) D_i^(-1/2)`` on the i-th of n shares, D_i the diagonal of rank i's
    curvature: where shares are single entries, the mean of ``C_i L_i C_i`` is the identity
    (arXiv 2306.16484, section 4). It is biased as a compressor, and has no residual. The bytes are
    those of `PermK`.

    Args:
        diagonals: D_i by rank, all of them on all ranks; a group of fewer ranks has the first.
        seed: as of `PermK`.
        run_length: as of `PermK`.
    """

    diagonals: tuple[Diagonal, ...]
    seed: int = 0
    run_length: int = 32

    def __post_init__(self) -> None:
        if not isinstance(self.diagonals, tuple) or not self.diagonals:
            raise ValueError(
                f"diagonals must be a tuple of one for each rank, got {self.diagonals!r}"
            )
        for diagonal in self.diagonals:
            _check_diagonal(diagonal)
        check_run_length(self.run_length)

    def num_shares(self) -> int:
        """As many as there are diagonals."""
        return len(self.diagonals)

    def for_num_ranks(self, num_ranks: int) -> "HeterogeneousPermK":
        """As `PermutationSketch.among`."""
        if num_ranks > len(self.diagonals):
            raise ValueError(
                f"diagonals must be one for each of {num_ranks} ranks, got {len(self.diagonals)}"
            )
        return replace(self, diagonals=self.diagonals[:num_ranks])

    def precondition_(self, values: Tensor, order: Order, state: CompressorState) -> None:
        """By this rank's inverse roots, and by that of the number of ranks."""
        super().precondition_(values, order, state)
        values.div_(order.num_ranks**0.5)

    def _diagonal(self, rank: int) -> Diagonal:
        if rank >= len(self.diagonals):
            raise ValueError(
                f"diagonals must be one for each rank, got {len(self.diagonals)} on rank {rank}"
            )
        return self.diagonals[rank]


def _check_diagonal(diagonal: object) -> None:
    if not isinstance(diagonal, Diagonal):
        raise ValueError(
            f'diagonal must be an object such as Diagonal({{"*": 2.0}}), got {diagonal!r}'
        )
