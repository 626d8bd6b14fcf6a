"""``quantize_difference_``: samples for the parity harness, and tests of this op alone."""

from itertools import cycle, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyparallel.ops import mix_, mix_quantized_, quantize_difference_
from pyparallel.ops._checks import num_blocks
from pyparallel.ops._formats import find_format
from pyparallel.ops._philox import as_seed
from pyparallel.ops.quantize_difference import quantize_difference_reference
from tests.ops.parity import (
    COMPILED_CPU,
    DTYPES,
    assert_parity,
    assert_refused,
    double,
    each_compiled,
    fuzz,
)

FORMATS = [(8, "int"), (4, "int"), (8, "e4m3"), (8, "e5m2")]
BLOCK_SIZES = [32, 64, 128, 256, 512, 1024, 2048, 4096]
SEEDS = [None, 2**63 + 5]


def prepare(z, replica, kind=FORMATS[0], block_size=256, seed=None, offset=0, ratio=0.7):
    """Return arguments of the op itself; outputs are filled with garbage."""
    numel, format = z.numel(), find_format(*kind)
    codes = torch.full((format.num_codes(numel),), 85, dtype=format.dtype)
    scales = torch.full((num_blocks(numel, block_size),), float("nan"))
    numbers = as_seed(seed), torch.tensor(offset)
    return z, replica, double(ratio), *kind, block_size, *numbers, codes, scales


def sample(numel, *, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(numel)
    z, replica = (scale * torch.randn(numel, generator=generator).to(dtype) for _ in range(2))
    return z, replica


def parity(implementation, *arguments):
    reference = quantize_difference_reference
    assert_parity(implementation, "quantize_difference_", reference, prepare(*arguments))


@each_compiled
def test_lengths(implementation):
    for numel, kind in product(implementation.lengths, FORMATS[:2]):
        parity(implementation, *sample(numel), kind, 256, 2**63 + 5, 2**33 + 1)


@each_compiled
def test_dtypes_formats_and_seeds(implementation):
    for dtype, kind, seed in implementation.cases(DTYPES, FORMATS, SEEDS):
        parity(implementation, *sample(2003, dtype=dtype), kind, 128, seed)


@each_compiled
def test_block_sizes(implementation):
    rows = product(BLOCK_SIZES, FORMATS)
    for block_size, kind in zip(BLOCK_SIZES, cycle(FORMATS)) if implementation.is_slow else rows:
        parity(implementation, *sample(9001), kind, block_size)


@each_compiled
def test_zero_tiny_huge_infinite_and_nan_differences(implementation):
    z, replica = sample(32 * 8 + 5)
    z[:32] = replica[:32]
    z[32:64], replica[32:64] = 1e-31, 0
    z[64:96] *= 1e37
    for block, value in enumerate((float("inf"), -float("inf"), float("nan")), start=3):
        z[32 * block + 7] = value
    replica[32 * 6] = float("nan")
    for kind, seed in product(FORMATS, SEEDS):
        parity(implementation, z, replica, kind, 32, seed)
    quantize_difference_(z, replica, 0.5, block_size=32)
    bad = torch.arange(z.numel()) // 32 % 8
    assert torch.equal(replica.isnan(), (bad >= 3) & (bad <= 6))
    assert torch.equal(z.isnan(), replica.isnan())


@fuzz
@given(
    st.integers(0, 70_000),
    st.sampled_from(DTYPES),
    st.sampled_from(FORMATS),
    st.sampled_from(BLOCK_SIZES),
    st.none() | st.integers(0, 2**64 - 1),
    st.integers(0, 2**63 - 1),
    st.sampled_from([0.0, 1e-3, 1.0, 15.0]),
)
def test_compiled_cpu_on_anything(numel, dtype, kind, block_size, seed, offset, ratio):
    parity(COMPILED_CPU, *sample(numel, dtype=dtype), kind, block_size, seed, offset, ratio)


def test_mass_is_conserved_between_a_sender_and_a_receiver():
    # In float64: sent and kept numerators add up to the one before, whatever the message loses.
    for kind, dtype in product(FORMATS, DTYPES[:2]):
        z, replica = sample(3001, dtype=dtype)
        before = z.double()
        quantize_difference_(z, replica, 0.25 / 0.75, bits=kind[0], format=kind[1])
        after = 0.75 * z.double() + 0.25 * replica.double()
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(after, before, rtol=tolerance, atol=tolerance)


def test_the_receiver_follows_the_sender_bit_for_bit():
    for kind, dtype in product(FORMATS, DTYPES):
        named = {"bits": kind[0], "format": kind[1], "block_size": 64}
        z, sent = sample(1003, dtype=dtype)
        received, own = sent.clone(), torch.zeros(1003, dtype=dtype)
        for index in range(3):
            codes, scales = quantize_difference_(z, sent, 0.5, **named, seed=7, offset=index)
            expected, weight = own.clone(), double(0.5)
            mix_quantized_(
                own, weight, [codes], [scales], torch.tensor([0.5]).double(), **named,
                replicas=[received],
            )  # fmt: skip
            assert torch.equal(received, sent), (kind, dtype)
            mix_(expected, double(0.5), [sent], torch.tensor([0.5]).double())
            assert torch.equal(own, expected), (kind, dtype)


def test_out_and_ratios_of_every_kind():
    z, replica = sample(100)
    out = torch.empty(100, dtype=torch.int8), torch.empty(1)
    results = []
    for ratio in (0.5, double(0.5), torch.tensor(0.5)):
        own, copy = z.clone(), replica.clone()
        assert quantize_difference_(own, copy, ratio, out=out)[0] is out[0]
        results.append(own)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def good():
    z, replica = sample(100)
    return {"z": z, "replica": replica, "ratio": double(1.0)}


def direct(arguments):
    """Return the arguments of the op itself."""
    named = {"bits": 8, "format": "int", "block_size": 256, "seed": None, "offset": 0} | arguments
    codes, scales = named.pop("out", (torch.zeros(100, dtype=torch.int8), torch.zeros(1)))
    order = "z", "replica", "ratio", "bits", "format", "block_size", "seed"
    offset = torch.as_tensor(named["offset"])
    return *(named[name] for name in order), offset, codes, scales


def test_bad_arguments_are_refused():
    codes, scales = torch.zeros(100, dtype=torch.int8), torch.zeros(1)
    shared = torch.zeros(150)
    rows = [
        ({"z": torch.zeros(10, 10)}, r"z must be a contiguous 1-d .* shape \[10, 10\]"),
        ({"replica": torch.zeros(99)}, r"replica must be .* z's length .* shape \[99\]"),
        ({"replica": torch.zeros(100).bfloat16()}, r"replica must be of z's dtype .* got bfloat16"),
        ({"z": shared[:100], "replica": shared[50:]}, "replica must not overlap z, got 200 bytes"),
        ({"ratio": torch.ones(1).double()}, r"ratio must be a number, or a 0-d .* shape \[1\]"),
        ({"bits": 5}, "bits and format must be .*, got 5 and int"),
        ({"format": "natural"}, "bits and format must be .*, or 8 and e5m2, got 8 and natural"),
        ({"block_size": 31}, "block_size must be a power of two from 32 to 4096, got 31"),
        ({"offset": torch.zeros(2).long()}, r"offset must be a number, or a 0-d int64 .* \[2\]"),
        ({"out": (codes[:99], scales)}, r"codes must be .* \[100\] on cpu, got .* \[99\]"),
        ({"out": (codes, torch.zeros(2))}, r"scales must be .* \[1\] on cpu, got .* \[2\]"),
    ]
    assert_refused(quantize_difference_, good, rows, direct)


@pytest.mark.parametrize("ratio", [-0.1, float("inf"), float("nan")])
def test_impossible_ratios_are_refused(ratio):
    with pytest.raises(ValueError, match="ratio must be finite and at least 0, got"):
        quantize_difference_(**(good() | {"ratio": ratio}))
