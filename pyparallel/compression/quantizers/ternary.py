"""Ternary compression: two bits per entry and a scale per block."""

from dataclasses import dataclass, field

from .int_fp8 import Quantizer


@dataclass(frozen=True)
class Ternary(Quantizer):
    """-1, 0 or 1 times a scale (TernGrad, Wen et al., NeurIPS 2017, arXiv 1705.07878).

    The scale is the block's largest magnitude, and an entry is sent with probability ``|entry| /
    scale``, which is unbiased. A block with an inf or a nan decodes to nan everywhere and keeps its
    old residual; one whose largest magnitude is below 2**-100 is sent as zeros.

    With a residual, the draws are the same and the scale is the mean magnitude of the drawn
    entries, which minimizes the error. With the largest magnitude a message is farther from a block
    than 0 is, and residuals would grow from step to step.

    Args:
        block_size: entries per scale, a power of two from 32 to 4096. Larger blocks have a larger
            variance: the paper clips large entries instead, which is biased.
    """

    seed: int = field(default=0, kw_only=True)
    bits = 2
    format = "ternary"
