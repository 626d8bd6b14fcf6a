"""Gradients that are not finite, refused before they do any harm."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...comm.collectives import Collectives
from ..compressor import AttachPoint, Compressor, Message, check_buffer, not_a_compressor
from ..layout import BufferLayout
from ..state import CompressorState


class NonFiniteError(RuntimeError):
    """A gradient with a nan or an inf; the sentence names the rank and the parameter."""


@dataclass(frozen=True)
class Finite(Compressor):
    """Refuses a buffer with a nan or an inf on all ranks alike, before it is sent or remembered.

    Without it such entries pass through, for all to see and for a ``GradScaler`` to find; with it
    a step ends in a `NonFiniteError` that says where they came from, and what is remembered of that
    buffer stays as it was; other buffers of the step may have been sent, and their means are to be
    dropped. It is to be the outermost wrapper. Out of DDP's backward pass the error comes as a
    RuntimeError that quotes it. Costs one all-gather of a number a buffer. On GPUs the host waits
    for that number, which takes away most of the overlap with the backward pass: there it is a
    means to find out.

    Args:
        compressor: of what is finite.
    """

    compressor: Compressor

    def __post_init__(self) -> None:
        if problem := not_a_compressor(self.compressor):
            raise ValueError(problem)

    @property
    def unbiased(self) -> bool:
        """As of the compressor."""
        return self.compressor.unbiased

    @property
    def fixed_length(self) -> bool:
        """As of the compressor."""
        return self.compressor.fixed_length

    @property
    def feeds_back(self) -> bool:
        """As of the compressor."""
        return self.compressor.feeds_back

    @property
    def takes_residual(self) -> bool:
        """As of the compressor."""
        return self.compressor.takes_residual

    def validation_error(self, place: AttachPoint) -> str | None:
        """As of the compressor."""
        return self.compressor.validation_error(place)

    def contraction(self, layout: BufferLayout) -> float | None:
        """As of the compressor."""
        return self.compressor.contraction(layout)

    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        """As of the compressor."""
        return CompressorState(layout, rank, inner=[self.compressor.init(layout, device, rank)])

    def compress(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None
    ) -> Message:
        """As of the compressor.

        Raises:
            NonFiniteError: a nan or an inf in x.
        """
        check_buffer(x, state.layout)
        piece = _first_nonfinite(x, state.layout)
        if piece >= 0:
            raise _refusal(state.rank, piece, state.layout)
        return self.compressor.compress(x, _inner(state), residual)

    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        """As of the compressor."""
        return self.compressor.decompress(message, layout, out, accumulate=accumulate)

    def mean_(
        self,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Tensor | None = None,
    ) -> None:
        """As of the compressor.

        Raises:
            NonFiniteError: a nan or an inf in any rank's x; on all of them, the same sentence.
        """
        check_buffer(x, state.layout)
        mine = torch.tensor([_first_nonfinite(x, state.layout)], device=x.device)
        for rank, (piece,) in enumerate(collectives.all_gather(mine).tolist()):
            if piece >= 0:
                raise _refusal(rank, piece, state.layout)
        self.compressor.mean_(x, _inner(state), collectives, residual)


def _inner(state: CompressorState) -> CompressorState:
    """That of the compressor, at the same step."""
    inner = state.inner[0]
    inner.step = state.step
    state.step += 1
    return inner


def _first_nonfinite(x: Tensor, layout: BufferLayout) -> int:
    """The piece that holds the first such entry, or -1."""
    if x.numel() == 0 or bool(torch.stack(x.aminmax()).isfinite().all()):
        return -1
    parts = layout.split(x)
    return next(i for i, part in enumerate(parts) if not bool(part.isfinite().all()))


def _refusal(rank: int, piece: int, layout: BufferLayout) -> NonFiniteError:
    return NonFiniteError(
        f"gradients must be finite, got nan or inf from rank {rank} in {layout.names[piece]}: "
        "nothing of that buffer has been sent or remembered; the step is not to be taken"
    )
