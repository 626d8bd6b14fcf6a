"""Compressors whose messages are gathered whole by every rank: sparse ones."""

import torch
from torch import Tensor

from ...comm.collectives import Collectives
from ..compressor import Compressor
from ..state import CompressorState
from ..validation import naming_the_sender


class AllGatherCompressor(Compressor):
    """A mean gathers all messages on all ranks, which decode and add them in one order.

    What a rank receives grows with their number, so messages should be much smaller than x.
    """

    def mean_(
        self,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Tensor | None = None,
    ) -> None:
        """As `Compressor.mean_`."""
        with collectives.stats.encoding():
            message = self.compress(x, state, residual)
        messages = collectives.all_gather_uneven(message)
        with collectives.stats.decoding():
            total = x.zero_() if x.dtype == torch.float32 else torch.zeros_like(x).float()
            for sender, each in enumerate(messages):
                with naming_the_sender(sender):
                    self.decompress(each, state.layout, total, accumulate=True)
            x.copy_(total.div_(collectives.size))
