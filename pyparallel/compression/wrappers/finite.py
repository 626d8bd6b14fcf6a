"""A check for nan and inf before a buffer is sent."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ...comm.collectives import Collectives
from ..compressor import AttachPoint, Compressor, Message, not_a_compressor
from ..layout import BufferLayout
from ..nonfinite import check_finite_on_all_ranks, first_nonfinite, nonfinite_error
from ..state import CompressorState


@dataclass(frozen=True)
class Finite(Compressor):
    """Raises on all ranks for a buffer with a nan or an inf, before it is sent or added to state.

    In hooks ``nonfinite="raise"`` does the same for any compressor, and on GPUs without waiting;
    with this the host waits there, for the error in the same step. A step ends in a
    `NonFiniteError` that names rank and parameter. The state of that buffer is unchanged; other
    buffers of the step may have been sent, and their means must be discarded. It must be the
    outermost wrapper. Costs a pass and an all-gather of a number per buffer.

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
        piece = first_nonfinite(x, state.layout)
        if piece >= 0:
            raise nonfinite_error(state.rank, state.layout.names[piece])
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
        check_finite_on_all_ranks(x, state.layout, collectives)
        self.compressor.mean_(x, _inner(state), collectives, residual)


def _inner(state: CompressorState) -> CompressorState:
    """Return the wrapped compressor's state, at the same step."""
    inner = state.inner[0]
    inner.step = state.step
    state.step += 1
    return inner
