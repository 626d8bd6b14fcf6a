import pytest
import torch

from benchmarks.theory.contraction import contraction
from pyparallel import ops
from pyparallel.compression import BufferLayout, Fp4, Fp8, Int4, Int8, Sign, Ternary

CPU = torch.device("cpu")
LAYOUT = BufferLayout.flat(301)
X = torch.randn(301, generator=torch.Generator().manual_seed(0))
MESSAGES = [
    (Int8(), 301, torch.int8, {"bits": 8, "format": "int"}),
    (Int4(), 151, torch.uint8, {"bits": 4, "format": "int"}),
    (Fp4(), 151, torch.uint8, {"bits": 4, "format": "e3m0"}),
    (Fp8(), 301, torch.uint8, {"bits": 8, "format": "e4m3"}),
    (Fp8("e5m2"), 301, torch.uint8, {"bits": 8, "format": "e5m2"}),
]


def test_messages_are_those_of_the_op(subtests):
    for compressor, length, dtype, code in MESSAGES:
        with subtests.test(str(compressor)):
            codes, scales = compressor.compress(X, compressor.init(LAYOUT, CPU))
            expected = ops.quantize(X, **code)
            assert torch.equal(codes, expected[0])
            assert torch.equal(scales, expected[1])
            assert (len(codes), len(scales)) == compressor.sizes(301) == (length, 2)
            assert codes.dtype == dtype


def test_the_worst_block_loses_what_is_declared():
    """All but the largest entry lie half way between levels, the largest possible error."""
    x = torch.full((256,), 0.5)
    x[0] = 7.0
    for place in range(1, 256):
        x[place] -= 1e-6 * (place % 2)  # ties round to 0 anyway
    decoded = Int4().decompress(
        Int4().compress(x, Int4().init(BufferLayout.flat(256), CPU)),
        BufferLayout.flat(256),
        torch.empty(256),
    )
    lost = (decoded - x).square().sum() / x.square().sum()
    assert float(lost) == pytest.approx(1 - contraction(Int4(), BufferLayout.flat(256)), rel=1e-4)


def test_bad_settings_are_rejected(subtests):
    for make in [Int8, Int4, Fp8, Sign, Ternary]:
        with (
            subtests.test(str(make)),
            pytest.raises(ValueError, match="block_size must be a power of two from 32 to 4096"),
        ):
            make(block_size=100)


def test_unknown_formats_are_rejected():
    with pytest.raises(ValueError, match="format must be 'e4m3' or 'e5m2', got 'e3m4'"):
        Fp8("e3m4")
