"""Compressors at the settings that are compared and recommended, simpler ones first."""

from dataclasses import dataclass

from ..compression import (
    QSGD,
    Cast,
    Compressor,
    ErrorFeedback,
    Fp8,
    Int4,
    Int8,
    Natural,
    PowerSGD,
    Sign,
    Ternary,
    TopK,
)


@dataclass(frozen=True)
class Candidate:
    """A compressor under the name that stands in tables.

    Args:
        compressor: None: an all-reduce in float32, as DistributedDataParallel does it.
    """

    name: str
    compressor: Compressor | None


DENSE = Candidate("fp32", None)
HALF = Candidate("bf16", Cast())
CANDIDATES = (
    DENSE,
    HALF,
    Candidate("int8", Int8()),
    Candidate("int8-ef", ErrorFeedback(Int8())),
    Candidate("fp8-ef", ErrorFeedback(Fp8())),
    Candidate("qsgd", QSGD()),
    Candidate("natural", Natural()),
    Candidate("int4-ef", ErrorFeedback(Int4())),
    Candidate("ternary", Ternary()),
    Candidate("ternary-ef", ErrorFeedback(Ternary())),
    Candidate("sign-ef", ErrorFeedback(Sign())),
    Candidate("powersgd-ef", ErrorFeedback(PowerSGD())),
    Candidate("topk-ef", ErrorFeedback(TopK(0.01))),
)
