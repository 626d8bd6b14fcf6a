"""What a message loses is remembered, and sent later."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...comm.collectives import Collectives
from ..compressor import AttachPoint, Compressor, Message, not_a_compressor
from ..layout import BufferLayout
from ..residual import RESIDUAL, check_no_residual
from ..state import CompressorState


@dataclass(frozen=True)
class ErrorFeedback(Compressor):
    """What a message loses is added to the next one's buffer.

    Whatever the compressor, after any number of steps the messages add up to the buffers, less one
    residual (Seide et al., Interspeech 2014; Stich et al., NeurIPS 2018, arXiv 1809.07599;
    Karimireddy et al., ICML 2019, arXiv 1901.09847). Costs 4 bytes an entry, of float32.

    Args:
        compressor: any that does not feed back itself.
    """

    compressor: Compressor

    def __post_init__(self) -> None:
        if problem := not_a_compressor(self.compressor):
            raise ValueError(problem)
        if self.compressor.feeds_back:
            raise ValueError(f"compressor must not feed back already, got {self.compressor}")
        if not self.compressor.takes_residual:
            raise ValueError(
                "compressor must decode to an approximation of what it is given, or its errors "
                f"grow, got {self.compressor}; use PermK()"
            )

    @property
    def unbiased(self) -> bool:
        """No: it is right in the long run."""
        return False

    @property
    def fixed_length(self) -> bool:
        """As of the compressor."""
        return self.compressor.fixed_length

    @property
    def feeds_back(self) -> bool:
        """Yes."""
        return True

    def validation_error(self, place: AttachPoint) -> str | None:
        """It serves nothing whose entries are not the same thing from one message to the next."""
        if place in (AttachPoint.PIPELINE, AttachPoint.FSDP_PARAMETERS):
            return (
                f"compressor must not feed back errors where it serves {place.value}: the next "
                f"message is of something else; got {self}, use {self.compressor}"
            )
        if place is AttachPoint.GOSSIP:
            return (
                f"compressor must not feed back errors where it serves {place.value}: what one "
                f"loses is in the next one already; got {self}, use {self.compressor}"
            )
        return self.compressor.validation_error(place)

    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        """With nothing lost yet."""
        residual = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        inner = self.compressor.init(layout, device, rank)
        return CompressorState(layout, rank, entries={RESIDUAL: residual}, inner=[inner])

    def compress(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None
    ) -> Message:
        """As `Compressor.compress`, with a residual of its own."""
        check_no_residual(residual)
        return self.compressor.compress(x, state.inner[0], state.entries[RESIDUAL])

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
        """As of the compressor, with a residual of its own."""
        check_no_residual(residual)
        self.compressor.mean_(x, state.inner[0], collectives, state.entries[RESIDUAL])
