"""Quantizers: compressors that send every entry with fewer bits."""

from .blockwise import BlockwiseCompressor
from .cast import Cast
from .int_fp8 import Fp4, Fp8, Int4, Int8
from .natural import Natural
from .qsgd import QSGD
from .sign import Sign
from .statistical import Statistical
from .ternary import Ternary

__all__ = [
    "QSGD",
    "BlockwiseCompressor",
    "Cast",
    "Fp4",
    "Fp8",
    "Int4",
    "Int8",
    "Natural",
    "Sign",
    "Statistical",
    "Ternary",
]
