"""PowerSGD: low-rank gradients by one step of power iteration."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from ... import ops
from ...comm.collectives import Collectives
from ...ops.orthogonalize import MAX_COLUMNS
from ...training.arguments import require
from ..compressor import AttachPoint, Compressor, Message
from ..corrupt_messages import CorruptMessageError
from ..layout import BufferLayout, Piece
from ..residual import Residual
from ..state import CompressorState
from .matrices import Batch, Matrices

Q = "q"


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Low-rank approximation (Vogels et al., NeurIPS 2019, arXiv 1905.13727).

    A parameter of two or more dimensions is a matrix M: its first dimension by all others. With Q
    of the last step, ``P = orthonormal columns of the sum of M Q over ranks`` and ``Q = mean of M^T
    P``; then every rank has P Q^T, for two all-reduces of a few columns, for any number of ranks.
    Use it with error feedback: ``ErrorFeedback(PowerSGD(4))``. All other entries are sent
    uncompressed, in the first of the two all-reduces.

    Factors are computed and sent in float32 for every dtype of x. Q is kept for each parameter by
    name and orthonormalized before use, so gradients may have any magnitude; zero gradients do not
    change it. A nan or an inf makes its matrix nan on all ranks, leaves Q unchanged, and resets the
    residual of this matrix to zero.

    Args:
        rank: columns of P and Q, from 1 to 64; at most the smaller dimension of a matrix.
        seed: seed of the initial Q, the same on all ranks: normal draws by parameter name.
        min_ratio: a matrix is compressed if ``(rows + columns) * rank * min_ratio < rows *
            columns``. 2 saves bytes for 16-bit gradients too; 0 compresses all matrices.
    """

    refusals: ClassVar[Mapping[AttachPoint, str]] = {
        **dict.fromkeys(
            (AttachPoint.FSDP_GRADIENTS, AttachPoint.FSDP_PARAMETERS),
            "compressor must not need matrices for {place}, whose shards are flat parts of "
            "matrices; got {self}, use one that works by entries or blocks",
        ),
        AttachPoint.PIPELINE: "compressor must not rely on error feedback for {place}: the error "
        "of the low rank would be lost; got {self}, use one that keeps every entry",
    }
    rank: int = 4
    seed: int = 0
    _: KW_ONLY
    min_ratio: float = 2.0

    def __post_init__(self) -> None:
        require(1 <= self.rank <= MAX_COLUMNS, f"rank must be from 1 to {MAX_COLUMNS}", self.rank)
        require(self.min_ratio >= 0, "min_ratio must be >= 0", self.min_ratio)

    @override
    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        matrices = self._matrices(layout, device)
        pieces = {
            name: {Q: self._draw(name, batch).to(device)}
            for batch in matrices.batches
            for name in batch.names
        }
        return CompressorState(layout, rank, pieces=pieces)

    @override
    def compress(self, x: Tensor, state: CompressorState, residual: Residual = None) -> Message:
        """Return (P of all matrices, Q^T of all matrices, other entries), all flat float32."""
        state.begin_message(x)
        matrices = self._matrices(state.layout, x.device)
        total, basis, first = _multiply(matrices, x, state, residual)
        others, left = _orthogonalize(matrices, first)
        right = _project(matrices, total, left)
        _remember(matrices, state, basis, right)
        if residual is not None:
            for batch, p, q in _factors(matrices, left, right):
                _subtract_product(batch.view(residual), p, q)
            if matrices.spans:
                torch._foreach_zero_(matrices.others(residual))
            _clear_non_finite(residual, torch.float32, right, others)
        return left, right, others

    @override
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        layout.check(out)
        matrices = self._matrices(layout, out.device)
        left, right, others = _checked(message, matrices)
        for batch, p, q in _factors(matrices, left, right):
            if accumulate:
                batch.view(out).add_(torch.bmm(p, q))
            else:
                _write_product(batch.view(out), p, q)
        if matrices.spans:
            write = torch._foreach_add_ if accumulate else torch._foreach_copy_
            write(matrices.others(out), matrices.split_others(others))
        return out

    @override
    def mean_(
        self, x: Tensor, state: CompressorState, collectives: Collectives, residual: Residual = None
    ) -> None:
        """Average by two all-reduces; the residual includes the rounding to the dtype of x."""
        state.begin_message(x)
        matrices = self._matrices(state.layout, x.device)
        with collectives.stats.encoding():
            total, basis, first = _multiply(matrices, x, state, residual)
        collectives.all_reduce_(first)
        with collectives.stats.encoding():
            others, left = _orthogonalize(matrices, first)
            right = _project(matrices, total, left)
        collectives.all_reduce_(right)
        with collectives.stats.decoding():
            right.div_(collectives.size)
            others.div_(collectives.size)
            _remember(matrices, state, basis, right)
            _write_mean(matrices, x, residual, left, right, others)
            if residual is not None:
                _clear_non_finite(residual, x.dtype, right, others)

    def _matrices(self, layout: BufferLayout, device: torch.device) -> Matrices:
        # CPUs are fastest with one matrix at a time, which stays in cache between passes.
        return Matrices.of(layout, self.rank, self.min_ratio, singly=device.type == "cpu")

    def _draw(self, name: str, batch: Batch) -> Tensor:
        piece = BufferLayout((Piece(name, (batch.rows, batch.columns)),))
        generator = torch.Generator().manual_seed(
            CompressorState(piece).seed(self.seed, shared=True)
        )
        shape = (batch.columns, batch.rank)
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _multiply(
    matrices: Matrices, x: Tensor, state: CompressorState, residual: Residual
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return x plus residual, bases of the spans of Q^T, and what is sent in the first all-reduce.

    The sum, (numel,) float32, is in the residual's storage if there is one. What is sent is
    uncompressed entries, then M Q of all matrices.
    """
    basis = _basis(matrices, state)
    total = x.float() if residual is None else residual
    first = total.new_empty(matrices.num_others + matrices.num_left)
    others, left = first.tensor_split([matrices.num_others])
    for batch, rows, p in zip(matrices.batches, basis, matrices.lefts(left), strict=True):
        if residual is not None:
            batch.view(residual).add_(batch.view(x).float())  # adding 16-bit numbers is slower
        torch.bmm(batch.view(total), rows.mT, out=p)
    if matrices.spans:
        if residual is not None:
            torch._foreach_add_(matrices.others(residual), matrices.others(x))
        torch.cat(matrices.others(total), out=others)
    return total, basis, first


def _basis(matrices: Matrices, state: CompressorState) -> list[Tensor]:
    stacked = [
        torch.stack([state.pieces[name][Q] for name in batch.names]) for batch in matrices.batches
    ]
    if stacked:
        ops.orthogonalize_(stacked)
    return [each.mT.contiguous() for each in stacked]  # CPUs multiply row-major three times as fast


def _orthogonalize(matrices: Matrices, first: Tensor) -> tuple[Tensor, Tensor]:
    others, left = first.tensor_split([matrices.num_others])
    if matrices.batches:
        ops.orthogonalize_(matrices.lefts(left))
    return others, left


def _project(matrices: Matrices, total: Tensor, left: Tensor) -> Tensor:
    """Return P^T M of all matrices, flat."""
    right = total.new_empty(matrices.num_right)
    for batch, p, q in _factors(matrices, left, right):
        torch.bmm(p.mT, batch.view(total), out=q)
    return right


def _factors(matrices: Matrices, left: Tensor, right: Tensor) -> list[tuple[Batch, Tensor, Tensor]]:
    return list(zip(matrices.batches, matrices.lefts(left), matrices.rights(right), strict=True))


def _remember(
    matrices: Matrices, state: CompressorState, basis: list[Tensor], right: Tensor
) -> None:
    """Keep Q for the next step; columns that are zero, nan or inf keep the old Q."""
    for batch, old, new in zip(matrices.batches, basis, matrices.rights(right), strict=True):
        largest = new.abs().amax(-1, keepdim=True)
        is_valid = (largest > 0) & (largest < torch.inf)
        kept = torch.where(is_valid, new, old).mT
        torch._foreach_copy_([state.pieces[name][Q] for name in batch.names], list(kept))


def _write_mean(
    matrices: Matrices, x: Tensor, residual: Residual, left: Tensor, right: Tensor, others: Tensor
) -> None:
    for batch, p, q in _factors(matrices, left, right):
        mine = batch.view(x)
        _write_product(mine, p, q)
        if residual is not None and x.dtype == torch.float32:
            _subtract_product(batch.view(residual), p, q, mine)
        elif residual is not None:
            batch.view(residual).sub_(mine.float())
    if matrices.spans:
        means, written = matrices.split_others(others), matrices.others(x)
        torch._foreach_copy_(written, means)
        if residual is not None:
            lost = matrices.others(residual)
            torch._foreach_copy_(lost, means)
            torch._foreach_sub_(lost, written)


def _write_product(out: Tensor, p: Tensor, q: Tensor) -> None:
    if out.dtype == torch.float32:
        torch.bmm(p, q, out=out)
    else:
        out.copy_(torch.bmm(p, q))


def _subtract_product(
    residual: Tensor, p: Tensor, q: Tensor, product: Tensor | None = None
) -> None:
    if residual.is_cpu:  # as saved runs do, bit for bit
        residual.sub_(torch.bmm(p, q) if product is None else product)
    else:
        residual.baddbmm_(p, q, alpha=-1)  # without reading the product


def _clear_non_finite(residual: Tensor, dtype: torch.dtype, right: Tensor, others: Tensor) -> None:
    """Set non-finite entries of the residual to 0; by the factors a CPU may save a pass over it."""
    limit = torch.finfo(dtype).max / MAX_COLUMNS  # products of smaller factors stay finite
    clean = residual.is_cpu and all(
        bool(each.abs().amax() < limit) for each in (right, others) if each.numel()
    )
    if not clean:
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _checked(message: Message, matrices: Matrices) -> Message:
    lengths = (matrices.num_left, matrices.num_right, matrices.num_others)
    fits = len(message) == len(lengths) and all(
        each.dtype == torch.float32 and each.shape == (length,)
        for each, length in zip(message, lengths, strict=True)
    )
    if not fits:
        got = ", ".join(f"{list(each.shape)} {each.dtype}" for each in message)
        raise CorruptMessageError(
            f"message must be P, Q^T and others, flat float32 of {lengths} entries, got {got}"
        )
    return message
