"""``orthogonalize_``: orthonormal columns for many tall matrices at once, as for PowerSGD."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._checks import FLOAT_DTYPES, describe
from ._library import checked, define

MAX_COLUMNS = 64
DEPENDENT = 1e-12  # squared norm of the orthogonal component over that of the column, at most


def orthogonalize_reference(matrices: list[Tensor]) -> None:
    """Compute the op in plain PyTorch: Gram-Schmidt in float64, every column orthogonalized twice.

    Compiled kernels compute the same columns by CholeskyQR2, up to rounding.
    """
    for matrix in matrices:
        columns = matrix.double()
        done, dependent = columns.new_zeros(columns.shape), []
        for j in range(columns.shape[-1]):
            column = columns[..., j : j + 1]
            rest = _remove(_remove(column, done), done)
            dependent.append(_norm_squared(rest) <= DEPENDENT * _norm_squared(column))
            done[..., j : j + 1] = torch.where(dependent[j], 0.0, _normalized(rest))
        for j, is_dependent in enumerate(dependent):
            other = _normalized(_unit_outside(done))
            done[..., j : j + 1] = torch.where(is_dependent, other, done[..., j : j + 1])
        matrix.copy_(done)


def _remove(column: Tensor, done: Tensor) -> Tensor:
    return column - done @ (done.mT @ column)


def _normalized(column: Tensor) -> Tensor:
    return column / _norm_squared(column).sqrt()


def _norm_squared(column: Tensor) -> Tensor:
    return (column * column).sum(-2, keepdim=True)


def _unit_outside(done: Tensor) -> Tensor:
    """Return the component orthogonal to the span of the unit vector with the least part in it."""
    row = (done * done).sum(-1).argmin(-1, keepdim=True)
    unit = done.new_zeros(done.shape[:-1]).scatter(-1, row, 1.0).unsqueeze(-1)
    return _remove(_remove(unit, done), done)


orthogonalize_unchecked = define(
    "orthogonalize_(Tensor(a!)[] matrices) -> ()", orthogonalize_reference
)
_orthogonalize_checked = checked(orthogonalize_unchecked)


def orthogonalize_(matrices: Sequence[Tensor]) -> None:
    """Replace the columns of each matrix by orthonormal ones, in place.

    Column ``j`` becomes its component orthogonal to the earlier ones, normalized: ``Q`` of a QR
    factorization whose ``R`` has a positive diagonal. A column that depends on the earlier ones
    (its component is at most 1e-6 of its norm, or it is zero) becomes a unit vector orthogonal to
    all others. So the result is orthonormal for any input, and a power iteration that has lost a
    direction finds another. PowerSGD (Vogels et al., NeurIPS 2019, arXiv 1905.13727) needs both.
    NaN and inf come out as NaN.

    Compiled kernels use CholeskyQR2 (Fukaya et al., ScalA 2014) with Gram matrices in float64. On
    GPUs all matrices share a launch, or four launches if the rows of a tall one are divided among
    blocks.

    Args:
        matrices: tensors (m, r) or batches (b, m, r), contiguous, all on one device; float32,
            bfloat16 or float16, with ``r <= m`` and ``r <= 64``; shapes and dtypes may differ.
            Written. 16-bit results are orthonormal up to rounding.
    """
    matrices = list(matrices)
    for index, matrix in enumerate(matrices):
        _check_matrix(f"matrices[{index}]", matrix, matrices[0])
    _orthogonalize_checked(matrices)


def _check_matrix(name: str, matrix: Tensor, first: Tensor) -> None:
    fits = matrix.dim() in (2, 3) and matrix.is_contiguous() and matrix.dtype in FLOAT_DTYPES
    if not (fits and matrix.shape[-1] <= min(matrix.shape[-2], MAX_COLUMNS)):
        raise ValueError(
            f"{name} must be a contiguous (m, r) or (b, m, r) tensor of float32, bfloat16 or "
            f"float16 with r <= m and r <= {MAX_COLUMNS}, got {describe(matrix)}"
        )
    if matrix.device != first.device:
        raise ValueError(
            f"{name} must be on the device of matrices[0] ({first.device}), got {describe(matrix)}"
        )
