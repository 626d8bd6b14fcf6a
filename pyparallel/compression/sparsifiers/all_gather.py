"""Compressors averaged by an all-gather of whole messages, as sparse ones are."""

import torch
from torch import Tensor
from typing_extensions import override

from ...comm.collectives import Collectives
from ..compressor import Compressor
from ..corrupt_messages import with_sender
from ..state import CompressorState


class AllGatherCompressor(Compressor):
    """A compressor whose mean all-gathers the messages; ranks decode and add them in one order.

    A rank receives a message from every rank, so messages should be much smaller than x.
    """

    @override
    def mean_(
        self,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Tensor | None = None,
    ) -> None:
        with collectives.stats.encoding():
            message = self.compress(x, state, residual)
        messages = collectives.all_gather_uneven(message)
        with collectives.stats.decoding():
            total = x.zero_() if x.dtype == torch.float32 else torch.zeros_like(x).float()
            for sender, each in enumerate(messages):
                with with_sender(sender):
                    self.decompress(each, state.layout, total, accumulate=True)
            x.copy_(total.div_(collectives.size))
