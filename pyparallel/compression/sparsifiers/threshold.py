"""The entries that are large enough, however many they are."""

import math
from dataclasses import dataclass

from torch import Tensor

from ..compressor import AttachPoint, Message, check_buffer
from ..layout import BufferLayout
from ..residual import add_residual
from ..state import CompressorState
from .all_gather import AllGatherCompressor
from .base import Sparsifier
from .top_k import TopK


@dataclass(frozen=True)
class Threshold(Sparsifier, AllGatherCompressor):
    """All entries of at least some magnitude (after Strom, Interspeech 2015), as they are.

    What is not sent is lost, unless by ``ErrorFeedback(Threshold(...))``. Messages are as long as
    they need to be, up to 8 bytes an entry of the buffer, and may be empty. A nan counts as large.
    On GPUs the host waits for each message's length.

    Args:
        threshold: the least magnitude that is sent, finite and above 0.
    """

    threshold: float

    def __post_init__(self) -> None:
        if not 0 < self.threshold < math.inf:
            raise ValueError(
                "threshold must be a magnitude, finite and above 0 (to send all entries: Cast or "
                f"no compressor), got {self.threshold!r}"
            )

    @property
    def unbiased(self) -> bool:
        """No."""
        return False

    @property
    def fixed_length(self) -> bool:
        """No."""
        return False

    def validation_error(self, place: AttachPoint) -> str | None:
        """It serves where lengths may vary."""
        if place is AttachPoint.GOSSIP:
            return (
                f"compressor must make messages of one length where it serves {place.value}, "
                f"which are received into buffers made beforehand; got {self}, use TopK"
            )
        return None

    def compress(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None
    ) -> Message:
        """As `Compressor.compress`: (values, indices)."""
        check_buffer(x, state.layout)
        state.step += 1
        total = add_residual(x, residual)
        large = ~(total.abs() < self.threshold)
        indices = large.nonzero().view(-1)
        chosen = total[indices]
        values = chosen.to(x.dtype)
        if residual is not None:
            rest = (chosen - values).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            residual.copy_(total).index_copy_(0, indices, rest)
        return values, indices.int() if x.numel() < 2**31 else indices

    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        """As of `TopK`."""
        return TopK(1.0).decompress(message, layout, out, accumulate=accumulate)

    def num_values(self, where: Message, layout: BufferLayout) -> int:
        """As `Sparsifier.num_values`."""
        return TopK(1.0).num_values(where, layout)
