"""Independent subnetwork training on quadratics with linear sketches, where all is computable."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyparallel.compression import CompressorState, PermK


@dataclass(frozen=True, eq=False)
class Quadratic:
    """``f_i(x) = x' L_i x / 2 - b_i' x`` on rank i of n; f is their mean.

    The model of Shulgin and Richtarik (arXiv 2306.16484). A sketch C_i, (d, d) and symmetric, is
    the subnetwork of rank i: it reads ``C_i x`` and sends ``C_i`` times its update. A diagonal D_i
    is that of L_i, and ``D_i^(-1/2)`` its entry-wise inverse root, not the diagonal of the matrix
    ``L_i^(-1/2)``.
    """

    # L_i, (n, d, d) float64, symmetric; positive semidefinite, their mean definite
    curvatures: Tensor
    slopes: Tensor  # b_i, (n, d) float64

    def __post_init__(self) -> None:
        curvatures, slopes = self.curvatures, self.slopes
        if curvatures.dim() != 3 or curvatures.shape[1] != curvatures.shape[2]:
            raise ValueError(f"curvatures must be (n, d, d), got {list(curvatures.shape)}")
        if slopes.shape != curvatures.shape[:2]:
            raise ValueError(
                f"slopes must be {list(curvatures.shape[:2])} to match the curvatures, got "
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
        """Number of ranks n."""
        return self.slopes.shape[0]

    @property
    def mean_curvature(self) -> Tensor:
        """Curvature of f, (d, d)."""
        return self.curvatures.mean(0)

    @property
    def diagonals(self) -> Tensor:
        """Diagonals D_i of the curvatures, (n, d)."""
        return self.curvatures.diagonal(dim1=1, dim2=2)

    @property
    def solution(self) -> Tensor:
        """Minimizer of f, (d,)."""
        return _solve(self.mean_curvature, self.slopes.mean(0))

    def gradients(self, points: Tensor) -> Tensor:
        """Return the gradient of f_i at the point of rank i: (..., n, d) from (..., n, d)."""
        return _times(self.curvatures, points) - self.slopes

    def sketched_gradient(self, x: Tensor, sketches: Tensor) -> Tensor:
        """Return ``mean_i C_i grad f_i(C_i x)``, (..., d): a biased estimate of f's gradient.

        Args:
            x: (..., d) float64: one point or several.
            sketches: (..., n, d, d) float64: one set for each point, or one for all.
        """
        gradients = self.gradients(_times(sketches, x[..., None, :]))
        return _times(sketches, gradients).mean(-2)

    def compressed_gradient(self, x: Tensor, sketches: Tensor) -> Tensor:
        """Return ``mean_i C_i grad f_i(x)``, (..., d): unbiased where the mean of the sketches is.

        Shapes are those of `sketched_gradient`, which reads ``C_i x`` instead of x.
        """
        points = x[..., None, :].expand(*x.shape[:-1], *self.slopes.shape)
        return _times(sketches, self.gradients(points)).mean(-2)

    def descend(self, x: Tensor, sketches: Tensor, step_size: float | Tensor) -> Tensor:
        """Return ``x - step_size * sketched_gradient``: the step of the theory for scaled sketches.

        The part of x that no sketch keeps stays unchanged instead of being merged.
        """
        return x - step_size * self.sketched_gradient(x, sketches)

    def preconditioned(self, diagonal: Tensor) -> "Quadratic":
        """Return the same functions of ``y = diagonal^(1/2) x``.

        Args:
            diagonal: (d,) float64, above 0, such as that of `mean_curvature`.
        """
        root = diagonal.rsqrt()
        return Quadratic(root[:, None] * self.curvatures * root, self.slopes * root)

    def expected_limit(self, scales: Tensor) -> Tensor:
        """Return `descend`'s limit in expectation with shares of d/n entries, times scales: (d,).

        The mean over all permutations of ``mean_i C_i L_i C_i`` keeps an off-diagonal entry if both
        its indices are in one share, which holds for (q - 1) of (d - 1) pairs, for q = d/n.

        Args:
            scales: (n, d) float64: factors of sketch i for the entries of its share; n for the
                Perm-q sketch.
        """
        n, d = self.slopes.shape
        if d % n:
            raise ValueError(f"d must be a multiple of the {n} ranks, got {d}")
        together = (d // n - 1) / (d - 1) if d > 1 else 0.0
        kept = torch.full((d, d), together, dtype=torch.float64).fill_diagonal_(1)
        scaled = scales[:, :, None] * self.curvatures * scales[:, None, :]
        return _solve((scaled * kept).mean(0), (scales * self.slopes).mean(0))


def ef21(estimates: Tensor, gradients: Tensor, kept: Tensor) -> Tensor:
    """Return the estimates of all ranks' gradients after EF21's messages (arXiv 2106.05203).

    Args:
        estimates: (..., n, d) g_i.
        gradients: (..., n, d) grad f_i(x), at the new x.
        kept: (..., n, d) 1 for the entries that rank i sends, else 0: unscaled, so contractive.
    """
    return estimates + kept * (gradients - estimates)  # g_i <- g_i + C(grad f_i(x) - g_i)


def drawn_sketches(
    sketch: PermK, states: Sequence[CompressorState], scales: Tensor | None = None
) -> Tensor:
    """Return the next sketches that a compressor draws: (n, d, d) float64, diagonal.

    The state of the buffer on each rank is updated as by a message. ``scales``, (n, d) float64, are
    factors of each share; None: n everywhere.
    """
    ones = torch.ones(states[0].layout.numel, dtype=torch.float32)
    messages = [sketch.compress(ones, state) for state in states]
    rows = [
        sketch.decompress(message, state.layout, torch.empty_like(ones))
        for message, state in zip(messages, states, strict=True)
    ]
    drawn = torch.stack(rows).double()
    return torch.diag_embed(drawn if scales is None else drawn * scales / len(states))


def _times(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (matrices @ vectors[..., None])[..., 0]


def _solve(matrix: Tensor, right: Tensor) -> Tensor:
    return torch.linalg.solve(matrix, right)
