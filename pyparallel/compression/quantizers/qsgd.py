"""QSGD: stochastic quantization."""

from dataclasses import dataclass, field

from ...training.arguments import check_one_of
from .int_fp8 import Quantizer


@dataclass(frozen=True)
class QSGD(Quantizer):
    """Stochastic rounding to uniform levels, unbiased (Alistarh et al., arXiv 1610.02132).

    Each block is divided by its largest magnitude, as in the paper's experiments, not by its
    Euclidean norm, as in its theorems: entries then lie on higher levels, and errors are smaller.
    Every level takes ``bits``: there is no Elias coding, so messages have a fixed length and are
    larger than the paper's bound when most levels are 0. Messages are those of ``Int8`` and
    ``Int4`` with a seed.

    Args:
        bits: 8, for 127 levels of each sign, or 4, for 7.
        block_size: entries per scale, a power of two from 32 to 4096.
    """

    bits: int = 8
    seed: int = field(default=0, kw_only=True)
    format = "int"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("bits", self.bits, (4, 8))
