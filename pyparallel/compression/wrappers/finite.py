"""A check for nan and inf before a buffer is sent."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ...comm.collectives import Collectives
from ..compressor import AttachPoint, Compressor, Message, not_a_compressor
from ..layout import BufferLayout
from ..nonfinite import check_finite_on_all_ranks, first_nonfinite_part, nonfinite_error
from ..state import CompressorState


def _of_wrapped(name: str) -> Any:
    """Return a property that is the wrapped compressor's."""
    return property(lambda self: getattr(self.compressor, name))


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

    unbiased = _of_wrapped("unbiased")
    fixed_length = _of_wrapped("fixed_length")
    feeds_back = _of_wrapped("feeds_back")
    takes_residual = _of_wrapped("takes_residual")

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
        state.layout.check(x)
        piece = first_nonfinite_part(x, state.layout)
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
        state.layout.check(x)
        check_finite_on_all_ranks(x, state.layout, collectives)
        self.compressor.mean_(x, _inner(state), collectives, residual)


def _inner(state: CompressorState) -> CompressorState:
    """Return the wrapped compressor's state, at the same step."""
    inner = state.inner[0]
    inner.step = state.step
    state.step += 1
    return inner
