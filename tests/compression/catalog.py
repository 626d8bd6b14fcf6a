"""Every compressor at documented settings, one row each, for the contract tests."""

from dataclasses import dataclass

import torch

from pyparallel.compression import (
    DGC,
    QSGD,
    BufferLayout,
    Cast,
    Chain,
    ChunkTopK,
    Compressor,
    ErrorFeedback,
    Fp4,
    Fp8,
    Int4,
    Int8,
    Natural,
    PermK,
    PerParameter,
    Piece,
    PowerSGD,
    RandomK,
    Sign,
    Statistical,
    Switch,
    Ternary,
    Threshold,
    TopK,
)

LAYOUT = BufferLayout(
    (
        Piece("hidden.weight", (24, 20)),
        Piece("hidden.bias", (24,)),
        Piece("gain", ()),
        Piece("nothing", (0, 3)),
        Piece("output.weight", (8, 24)),
    )
)


@dataclass(frozen=True)
class Row:
    """A compressor and its expected properties.

    Args:
        compressor: with settings from its documentation.
        full_rate: the compressor at its highest rate; None: that is far from lossless.
        tolerance: of a mean at full rate, times the largest magnitude on any rank.
        reseeded: the compressor with another seed; None: it is deterministic.
        draws_alike: whether all ranks make the same draws.
        feeds_back: whether ``ErrorFeedback`` may wrap it.
        shows_all: whether a nan propagates wherever it is, not only where it is sent.
        refuses: whether a message of the right lengths can be corrupt and is then rejected.
        names_sender: whether a mean sends messages of ``compress``, and so can reject one of them
            too.
    """

    compressor: Compressor
    full_rate: Compressor | None = None
    tolerance: float = 0.0
    reseeded: Compressor | None = None
    draws_alike: bool = False
    feeds_back: bool = True
    shows_all: bool = True
    refuses: bool = True
    names_sender: bool = True

    def __str__(self) -> str:
        return repr(self.compressor)

    @property
    def compressors(self) -> list[Compressor]:
        """The compressor, and with error feedback where possible."""
        wrapped = [ErrorFeedback(self.compressor)] if self.feeds_back else []
        return [self.compressor, *wrapped]


def _always(compressor: Compressor, tolerance: float, **options: object) -> Row:
    """Return a row of a compressor that is always at full rate."""
    return Row(compressor, full_rate=compressor, tolerance=tolerance, **options)


def _random(compressor: RandomK, reseeded: RandomK) -> Row:
    return Row(
        compressor,
        full_rate=RandomK(1.0),
        tolerance=1e-6,
        reseeded=reseeded,
        draws_alike=True,
        shows_all=False,
        names_sender=False,
    )


# Both encodings err by half a step rounded to nearest, and by a whole one stochastically.
CATALOG = [
    _always(Cast(), 2**-8, refuses=False),
    _always(Cast(torch.float16), 2**-11, refuses=False),
    _always(Int8(), 1.01 / 127),
    _always(Int8(block_size=64, seed=3), 2.01 / 127, reseeded=Int8(block_size=64, seed=4)),
    _always(Int4(block_size=128), 1.01 / 7),
    _always(Fp4(), 1.01 / 3),
    _always(Fp4(seed=0), 0.51, reseeded=Fp4(seed=1)),
    _always(Fp8(), 2.01 / 16),
    _always(Fp8("e5m2", seed=0), 4.01 / 8, reseeded=Fp8("e5m2", seed=1)),
    _always(QSGD(), 2.01 / 127, reseeded=QSGD(seed=1)),
    _always(QSGD(4), 2.01 / 7, reseeded=QSGD(4, seed=1)),
    Row(Sign(block_size=256)),
    Row(Sign()),
    Row(Statistical(block_size=1024)),
    Row(Statistical(4, block_size=256)),
    Row(Statistical(8, block_size=512)),
    Row(Ternary(), reseeded=Ternary(seed=1)),
    Row(Natural(), reseeded=Natural(seed=1)),
    Row(TopK(0.05), full_rate=TopK(1.0), tolerance=1e-6),
    Row(ChunkTopK(16, chunk=256), full_rate=ChunkTopK(256, chunk=256), tolerance=1e-6),
    Row(ChunkTopK(5, chunk=4096), full_rate=ChunkTopK(4096), tolerance=1e-6),
    Row(PowerSGD(2), full_rate=PowerSGD(64, min_ratio=0), tolerance=1e-5, refuses=False),
    Row(Threshold(0.5), full_rate=Threshold(1e-30), tolerance=1e-6),
    _random(RandomK(0.3), RandomK(0.3, seed=1)),
    _random(RandomK(0.3, seed=2, run_length=1), RandomK(0.3, run_length=1)),
    Row(
        PermK(num_ranks=3),
        reseeded=PermK(seed=1, num_ranks=3),
        shows_all=False,
        names_sender=False,
    ),
    Row(Chain(TopK(0.05), Int8()), full_rate=Chain(TopK(1.0), Int8()), tolerance=1.01 / 127),
    Row(Chain(ChunkTopK(16, chunk=256), Statistical())),
    Row(
        PerParameter({"*.bias": Cast(), "*": TopK(0.1)}),
        full_rate=PerParameter({"*.bias": TopK(1.0), "*": Threshold(1e-30)}),
        tolerance=1e-6,
        names_sender=False,
    ),
    Row(Switch({0: Cast(), 2: TopK(0.1)}), names_sender=False),
    Row(DGC(0.05), full_rate=DGC(1.0), tolerance=1e-6, feeds_back=False),
]
