"""Threshold sparsification: all entries above a magnitude."""

import math
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from ...training.arguments import require
from ..compressor import Message
from ..residual import Residual, add_residual
from ..state import CompressorState
from .base import IndexSparsifier


@dataclass(frozen=True)
class Threshold(IndexSparsifier):
    """All entries of at least some magnitude (after Strom, Interspeech 2015).

    The rest is lost without ``ErrorFeedback(Threshold(...))``. Messages have a variable length, up
    to 8 bytes an entry of the buffer, and may be empty. A nan counts as large. On GPUs the host
    waits for each message's length.

    Args:
        threshold: smallest magnitude that is sent, finite and positive.
    """

    threshold: float
    fixed_length = False

    def __post_init__(self) -> None:
        rule = "threshold must be finite and > 0"
        fix = "to send all entries, use Cast or no compressor"
        require(0 < self.threshold < math.inf, rule, self.threshold, fix)

    @override
    def compress(self, x: Tensor, state: CompressorState, residual: Residual = None) -> Message:
        """Return (values, indices)."""
        state.begin_message(x)
        total = add_residual(x, residual)
        large = ~(total.abs() < self.threshold)
        indices = large.nonzero().view(-1)
        chosen = total[indices]
        values = chosen.to(x.dtype)
        if residual is not None:
            rest = (chosen - values).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            residual.copy_(total).index_copy_(0, indices, rest)
        return values, indices.int() if x.numel() < 2**31 else indices
