"""A check for nan and inf before a buffer is sent."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ...comm.collectives import Collectives, int64_on
from ...comm.errors import NonFiniteError
from ..compressor import AttachPoint, Compressor, Message, not_a_compressor
from ..layout import BufferLayout
from ..state import CompressorState

__all__ = ["Finite", "NonFiniteError"]


@dataclass(frozen=True)
class Finite(Compressor):
    """Raises on all ranks for a buffer with a nan or an inf, before it is sent or added to state.

    Without it such entries propagate to all ranks, where a ``GradScaler`` finds them; with it a
    step ends in a `NonFiniteError` that names their rank and parameter. The state of that buffer is
    unchanged; other buffers of the step may have been sent, and their means must be discarded. It
    must be the outermost wrapper. In DDP's backward pass it is raised as a RuntimeError that quotes
    it. Costs one all-gather of a number per buffer. On GPUs the host waits for that number, which
    removes most of the overlap with the backward pass: use it there for debugging.

    Args:
        compressor: the wrapped compressor.
    """

    compressor: Compressor

    def __post_init__(self) -> None:
        if problem := not_a_compressor(self.compressor):
            raise problem

    @property
    @override
    def unbiased(self) -> bool:
        return self.compressor.unbiased

    @property
    @override
    def fixed_length(self) -> bool:
        return self.compressor.fixed_length

    @property
    @override
    def feeds_back(self) -> bool:
        return self.compressor.feeds_back

    @property
    @override
    def takes_residual(self) -> bool:
        return self.compressor.takes_residual

    @override
    def validation_error(self, place: AttachPoint) -> str | None:
        return self.compressor.validation_error(place)

    @override
    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        return CompressorState(layout, rank, inner=[self.compressor.init(layout, device, rank)])

    @override
    def compress(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None
    ) -> Message:
        """Encode a finite buffer.

        Raises:
            NonFiniteError: a nan or an inf in x.
        """
        state.layout.check(x)
        piece = _first_nonfinite(x, state.layout)
        if piece >= 0:
            raise _refusal(state.rank, piece, state.layout)
        return self.compressor.compress(x, _inner(state), residual)

    @override
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        return self.compressor.decompress(message, layout, out, accumulate=accumulate)

    @override
    def mean_(
        self,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Tensor | None = None,
    ) -> None:
        """Average finite buffers.

        Raises:
            NonFiniteError: a nan or an inf in any rank's x; the same error on all ranks.
        """
        state.layout.check(x)
        mine = int64_on(x.device, [_first_nonfinite(x, state.layout)])
        for rank, (piece,) in enumerate(collectives.all_gather(mine).tolist()):
            if piece >= 0:
                raise _refusal(rank, piece, state.layout)
        self.compressor.mean_(x, _inner(state), collectives, residual)


def _inner(state: CompressorState) -> CompressorState:
    """Return the wrapped compressor's state, at the same step."""
    inner = state.inner[0]
    inner.step = state.step
    state.step += 1
    return inner


def _first_nonfinite(x: Tensor, layout: BufferLayout) -> int:
    """Return the index of the first piece with a nan or an inf, or -1."""
    if x.numel() == 0 or bool(torch.stack(x.aminmax()).isfinite().all()):
        return -1
    parts = layout.split(x)
    return next(i for i, part in enumerate(parts) if not bool(part.isfinite().all()))


def _refusal(rank: int, piece: int, layout: BufferLayout) -> NonFiniteError:
    return NonFiniteError(
        f"gradients must be finite, got nan or inf from rank {rank} in {layout.names[piece]}: "
        "that buffer has not been sent and its state is unchanged; skip this optimizer step"
    )
