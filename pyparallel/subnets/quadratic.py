"""Independent subnetwork training where all can be computed: quadratics, with linear sketches."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compression import CompressorState
from ..compression.sparsifiers.permutation_sketch import PermutationSketch


@dataclass(frozen=True, eq=False)
class Quadratic:
    """``f_i(x) = x' L_i x / 2 - b_i' x`` on rank i of n; f is their mean.

    The model of Shulgin and Richtarik (arXiv 2306.16484). A sketch C_i, (d, d) and symmetric, is
    the subnetwork of rank i: it sees ``C_i x`` and sends ``C_i`` of what it has found. Where a
    diagonal D_i is meant, it is that of L_i, and ``D_i^(-1/2)`` its entry-wise inverse root, not
    the diagonal of the matrix ``L_i^(-1/2)``.

    Args:
        curvatures: L_i, (n, d, d) float64, symmetric; positive semidefinite, their mean definite.
        slopes: b_i, (n, d) float64.
    """

    curvatures: Tensor
    slopes: Tensor

    def __post_init__(self) -> None:
        curvatures, slopes = self.curvatures, self.slopes
        if curvatures.dim() != 3 or curvatures.shape[1] != curvatures.shape[2]:
            raise ValueError(f"curvatures must be (n, d, d), got {list(curvatures.shape)}")
        if slopes.shape != curvatures.shape[:2]:
            raise ValueError(
                f"slopes must be {list(curvatures.shape[:2])} as the curvatures are, got "
                f"{list(slopes.shape)}"
            )
        if {curvatures.dtype, slopes.dtype} != {torch.float64}:
            raise ValueError(
                f"curvatures and slopes must be float64, got {curvatures.dtype} and {slopes.dtype}"
            )
        if not torch.allclose(curvatures, curvatures.mT):
            raise ValueError("curvatures must be symmetric, got one that is not its transpose")

    @property
    def num_ranks(self) -> int:
        """The number n."""
        return self.slopes.shape[0]

    @property
    def mean_curvature(self) -> Tensor:
        """(d, d), of f."""
        return self.curvatures.mean(0)

    @property
    def diagonals(self) -> Tensor:
        """Of the curvatures: D_i, (n, d)."""
        return self.curvatures.diagonal(dim1=1, dim2=2)

    @property
    def solution(self) -> Tensor:
        """Where f is least, (d,)."""
        return _solve(self.mean_curvature, self.slopes.mean(0))

    def loss(self, x: Tensor) -> Tensor:
        """The mean of f_i at (..., d) points: (...)."""
        return (x * (x @ self.mean_curvature / 2 - self.slopes.mean(0))).sum(-1)

    def gradients(self, points: Tensor) -> Tensor:
        """Of f_i at the point of rank i: (..., n, d) from (..., n, d)."""
        return _times(self.curvatures, points) - self.slopes

    def sketched_gradient(self, x: Tensor, sketches: Tensor) -> Tensor:
        """``mean_i C_i grad f_i(C_i x)``, (..., d): a biased estimate of f's gradient.

        Args:
            x: (..., d) float64: points, or one.
            sketches: (..., n, d, d) float64: those of each point, or of all.
        """
        gradients = self.gradients(_times(sketches, x[..., None, :]))
        return _times(sketches, gradients).mean(-2)

    def step(self, x: Tensor, sketches: Tensor, step_size: float | Tensor) -> Tensor:
        """One round with one local step: ``mean_i [C_i x - step_size C_i grad f_i(C_i x)]``.

        It is `descend` where the mean of the sketches is the identity, as of `PermK`.

        Args:
            x: as of `sketched_gradient`.
            sketches: likewise.
            step_size: gamma, or a tensor of one for each point, (..., 1).
        """
        merged = _times(sketches.mean(-3), x)
        return merged - step_size * self.sketched_gradient(x, sketches)

    def descend(self, x: Tensor, sketches: Tensor, step_size: float | Tensor) -> Tensor:
        """``x - step_size * sketched_gradient``: the step of the theory for scaled sketches.

        What no sketch holds whole stays where it is, instead of being merged.
        """
        return x - step_size * self.sketched_gradient(x, sketches)

    def preconditioned(self, diagonal: Tensor) -> "Quadratic":
        """The same functions of ``y = diagonal^(1/2) x``.

        Args:
            diagonal: (d,) float64, above 0, such as that of `mean_curvature`.
        """
        root = diagonal.rsqrt()
        return Quadratic(root[:, None] * self.curvatures * root, self.slopes * root)

    def limit(self) -> Tensor:
        """Where `descend` leads in expectation with the sketches ``sqrt(n) D_i^(-1/2)``, (d,).

        ``sum_i D_i^(-1/2) b_i / (n sqrt(n))``, whatever the step size; it is not the `solution`.

        Raises:
            ValueError: shares are not single entries: d is not n.
        """
        n, d = self.slopes.shape
        if d != n:
            raise ValueError(
                f"d must be the number of ranks, {n}, got {d}; expected_limit(scales) serves "
                "shares of several entries"
            )
        return (self.diagonals.rsqrt() * self.slopes).mean(0).div(n**0.5)

    def expected_limit(self, scales: Tensor) -> Tensor:
        """Where `descend` leads in expectation with shares of d/n entries, times scales: (d,).

        The mean over all permutations of ``mean_i C_i L_i C_i`` keeps an off-diagonal entry where
        both its places are of one share, which (q - 1) of (d - 1) pairs are, for q = d/n.

        Args:
            scales: (n, d) float64: what sketch i multiplies the entries of its share by; n for the
                Perm-q sketch.
        """
        n, d = self.slopes.shape
        if d % n:
            raise ValueError(f"d must be a multiple of the {n} ranks, got {d}")
        together = (d // n - 1) / (d - 1) if d > 1 else 0.0
        kept = torch.full((d, d), together, dtype=torch.float64).fill_diagonal_(1)
        scaled = scales[:, :, None] * self.curvatures * scales[:, None, :]
        return _solve((scaled * kept).mean(0), (scales * self.slopes).mean(0))


def permutation_sketches(order: Tensor, scales: Tensor) -> Tensor:
    """Sketches that keep what a permutation gives each rank, scaled: (n, d, d) diagonal matrices.

    Args:
        order: (d,) int64, a permutation whose i-th n-th is rank i's.
        scales: (n, d) float64; n everywhere for the Perm-q sketch.
    """
    num_ranks, d = scales.shape
    if order.shape != (d,) or d % num_ranks:
        raise ValueError(
            f"order must be of {d} entries, a multiple of the {num_ranks} ranks, got "
            f"{list(order.shape)}"
        )
    rows = torch.arange(num_ranks)[:, None]
    kept = torch.zeros_like(scales)
    kept[rows, order.view(num_ranks, -1)] = 1
    return torch.diag_embed(scales * kept)


def every_order(d: int) -> Iterator[Tensor]:
    """All d! permutations of d entries, each (d,) int64."""
    return (torch.tensor(order) for order in itertools.permutations(range(d)))


def drawn_sketches(sketch: PermutationSketch, states: Sequence[CompressorState]) -> Tensor:
    """The next sketches that a compressor draws, (n, d, d) float64, as precise as float32.

    Args:
        sketch: of n shares.
        states: of the buffer on each of n ranks; written, as by a message.
    """
    ones = torch.ones(states[0].layout.numel, dtype=torch.float32)
    messages = [sketch.compress(ones, state) for state in states]
    rows = [
        sketch.decompress(message, state.layout, torch.empty_like(ones))
        for message, state in zip(messages, states, strict=True)
    ]
    return torch.diag_embed(torch.stack(rows).double())


def _times(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (matrices @ vectors[..., None])[..., 0]


def _solve(matrix: Tensor, right: Tensor) -> Tensor:
    solution: Tensor = torch.linalg.solve(matrix, right)
    return solution
