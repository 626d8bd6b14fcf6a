"""The compressors and outer steps that are compared and recommended, simpler ones first."""

from dataclasses import dataclass

from ...compression import (
    DGC,
    QSGD,
    Cast,
    Chain,
    ChunkTopK,
    Compressor,
    ErrorFeedback,
    Fp4,
    Fp8,
    Int4,
    Int8,
    Learned,
    Natural,
    PermK,
    PerParameter,
    PowerSGD,
    RandomK,
    Sign,
    Statistical,
    Switch,
    Ternary,
    Threshold,
    TopK,
)
from ...gossip import DiLoCo, MuLoCo, SparseLoCo, StreamingDiLoCo


@dataclass(frozen=True)
class Candidate:
    """A compressor with its name in tables; None: an all-reduce in float32, as DDP's."""

    name: str
    compressor: Compressor | None
    warm: Compressor | None = None  # the compressor without its warm-up, if it has one

    @property
    def steady_state(self) -> Compressor | None:
        """Return the compressor whose speed is measured: without warm-up."""
        return self.warm or self.compressor


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
    Candidate("fp4-ef", ErrorFeedback(Fp4())),
    Candidate("permk-ef", ErrorFeedback(PermK())),
    Candidate("ternary", Ternary()),
    Candidate("ternary-ef", ErrorFeedback(Ternary())),
    Candidate("statistical-ef", ErrorFeedback(Statistical())),
    Candidate("sign-ef", ErrorFeedback(Sign())),
    Candidate("powersgd-ef", ErrorFeedback(PowerSGD())),
    Candidate("topk-ef", ErrorFeedback(TopK(0.01))),
    Candidate("topk-int8-ef", ErrorFeedback(Chain(TopK(0.01), Int8()))),
    Candidate("sparseloco", ErrorFeedback(Chain(ChunkTopK(), Statistical()), decay=0.95)),
    Candidate("topk-weights-ef", PerParameter({"*weight": ErrorFeedback(TopK(0.01)), "*": Cast()})),
    Candidate(
        "bf16-then-topk-ef",
        Switch({0: Cast(), 200: ErrorFeedback(TopK(0.01))}),
        ErrorFeedback(TopK(0.01)),
    ),
    Candidate("randomk-ef", ErrorFeedback(RandomK(0.25))),
    Candidate("threshold-ef", ErrorFeedback(Threshold(0.01))),
    Candidate("dgc", DGC(0.01, warm_up=100), DGC(0.01)),
    Candidate(
        "learned-ef",
        ErrorFeedback(Learned(0.01, dense_steps=100, learning_steps=200)),
        ErrorFeedback(Learned(0.01, dense_steps=0, learning_steps=1)),
    ),
)
OUTER_STEPS: tuple[DiLoCo, ...] = (DiLoCo(), StreamingDiLoCo(), SparseLoCo(), MuLoCo())
