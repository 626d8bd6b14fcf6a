"""Codes for means and their inverses: samples for the parity harness, and their own tests."""

import math
from itertools import cycle, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyparallel.ops import dequantize_statistical, pack_signs, quantize_statistical, unpack_signs
from pyparallel.ops.pack_signs import (
    dequantize_statistical_reference,
    pack_signs_reference,
    quantize_statistical_reference,
    sizes_of_bins,
    unpack_signs_reference,
)
from tests.ops.parity import (
    COMPILED_CPU,
    DTYPES,
    LENGTHS,
    ON_GPU,
    assert_corrupt_is_refused,
    assert_parity,
    assert_refused,
    each_compiled,
    fuzz,
    moved,
)

BLOCK_SIZES = [32, 64, 128, 256, 512, 1024, 2048, 4096]
SPECIAL = [0.0, -0.0, 1e-45, -1e-38, 1.0, -3e38, 3e38, math.inf, -math.inf, math.nan]


def sample(numel, *, block_size=1024, dtypes=(torch.float32,) * 2, scale=1.0):
    generator = torch.Generator().manual_seed(numel + block_size)
    x, residual = (scale * torch.randn(numel, generator=generator) for _ in range(2))
    residual = None if dtypes[1] is None else residual.to(dtypes[1])
    return x.to(dtypes[0]), block_size, residual, *empty_message(numel, block_size)


def empty_message(numel, block_size):
    words = torch.full((math.ceil(numel / 8),), 0xA5, dtype=torch.uint8)
    return words, torch.full((math.ceil(numel / block_size),), -1.0)


def sample_message(numel, *, block_size=1024, accumulate=False, dtype=torch.float32):
    generator = torch.Generator().manual_seed(numel + block_size)
    words, scales = empty_message(numel, block_size)
    words = torch.randint(256, words.shape, generator=generator, dtype=torch.uint8)
    scales = torch.rand(scales.shape, generator=generator)
    out = torch.randn(numel, generator=generator).to(dtype)
    return words, scales, block_size, accumulate, out, torch.tensor(0)


def parity(implementation, arguments):
    assert_parity(implementation, "pack_signs", pack_signs_reference, arguments)


def parity_of_inverse(implementation, arguments):
    assert_parity(implementation, "unpack_signs", unpack_signs_reference, arguments)


@each_compiled
def test_lengths(implementation):
    for numel in implementation.lengths:
        parity(implementation, sample(numel))
        parity(implementation, sample(numel, dtypes=(torch.float32, None)))
        for accumulate in (False, True):
            parity_of_inverse(implementation, sample_message(numel, accumulate=accumulate))


@each_compiled
def test_block_sizes(implementation):
    lengths = (17, 4096, 4999, 8192 + 8)
    some = zip(BLOCK_SIZES, cycle(lengths[2:]))
    for block_size, numel in some if implementation.is_slow else product(BLOCK_SIZES, lengths):
        parity(implementation, sample(numel, block_size=block_size))
        parity_of_inverse(implementation, sample_message(numel, block_size=block_size))


@each_compiled
def test_dtypes(implementation):
    for *dtypes, block_size in implementation.cases(DTYPES, [None, *DTYPES], [64, 1024, 2048]):
        parity(implementation, sample(5003, block_size=block_size, dtypes=dtypes))


@each_compiled
def test_dtypes_of_the_inverse(implementation):
    for dtype, accumulate in product(DTYPES, (False, True)):
        parity_of_inverse(implementation, sample_message(5003, dtype=dtype, accumulate=accumulate))


@each_compiled
def test_magnitudes(implementation):
    for scale in (0.0, 1e-44, 1e-39, 1e-30, 1e30, 1e37, math.inf, math.nan):
        parity(implementation, sample(3000, scale=scale))


@each_compiled
def test_special_elements(implementation):
    for special in SPECIAL:
        x, *rest = sample(3000, block_size=128)
        x[1000] = special  # one block among ordinary ones
        parity(implementation, (x, *rest))
        parity(implementation, (torch.full_like(x, special), *rest))


@each_compiled
def test_special_scales(implementation):
    for scale in (0.0, -0.0, 1e-45, math.nan):
        words, scales, *rest = sample_message(3000)
        scales[1] = scale
        parity_of_inverse(implementation, (words, scales, *rest))


@each_compiled
def test_unaligned_buffers(implementation):
    x, block_size, residual, words, scales = sample(5003)
    parity(implementation, (x[1:], block_size, residual[1:], words, scales))
    words, scales, block_size, accumulate, out, corrupt = sample_message(5003)
    arguments = words[1:], scales, block_size, accumulate, out[8:], corrupt
    parity_of_inverse(implementation, arguments)


@fuzz
@given(
    st.integers(0, 40_000),
    st.sampled_from(BLOCK_SIZES),
    st.sampled_from(DTYPES),
    st.sampled_from([None, *DTYPES]),
    st.lists(st.tuples(st.integers(0, 40_000), st.sampled_from(SPECIAL)), max_size=4),
)
def test_compiled_cpu_on_anything(numel, block_size, dtype, residual_dtype, special):
    x, *rest = sample(numel, block_size=block_size, dtypes=(dtype, residual_dtype))
    for index, value in special:
        x[index : index + 1] = torch.tensor(value)  # infinite where it is too large
    parity(COMPILED_CPU, (x, *rest))


@fuzz
@given(st.integers(0, 40_000), st.sampled_from(BLOCK_SIZES), st.booleans(), st.sampled_from(DTYPES))
def test_compiled_cpu_unpacks_anything(numel, block_size, accumulate, dtype):
    arguments = sample_message(numel, block_size=block_size, accumulate=accumulate, dtype=dtype)
    parity_of_inverse(COMPILED_CPU, arguments)


def test_words_are_those_of_numpy():
    for numel in LENGTHS:
        x = torch.randn(numel)
        x[::7], x[1::7], x[2::7] = 0.0, -0.0, math.nan
        words, _ = pack_signs(x)
        expected = np.packbits(x.numpy() >= 0, bitorder="little")
        assert np.array_equal(words.numpy(), expected), f"{numel} elements"


def test_scales_are_mean_magnitudes():
    for block_size in BLOCK_SIZES:
        x = torch.randn(3 * block_size + 5)
        _, scales = pack_signs(x, block_size=block_size)
        expected = torch.stack([part.double().abs().mean() for part in x.split(block_size)])
        torch.testing.assert_close(scales.double(), expected, rtol=1e-6, atol=0.0)


def test_unsent_entries_stay_in_the_residual():
    for numel in (1, 1000, 5003):
        x, residual = torch.randn(numel), torch.randn(numel)
        accumulated = x + residual
        words, scales = pack_signs(x, residual=residual)
        sent = unpack_signs(words, scales, numel=numel)
        assert torch.equal(sent.sign(), torch.where(accumulated >= 0, 1.0, -1.0)), f"{numel}"
        assert torch.equal(residual, accumulated - sent), f"{numel}"


def test_a_block_with_inf_or_nan_does_not_affect_others():
    for poison in (math.inf, -math.inf, math.nan, 3e38):
        x, residual = torch.randn(3000), torch.randn(3000)
        x[1100:1200] = poison  # 3e38: finite, but its sum is not
        before, clean = residual.clone(), residual.clone()
        _, scales = pack_signs(x, residual=residual)
        words, _ = pack_signs(torch.where(x.abs() < 1e38, x, 0.0), residual=clean)
        assert scales.isnan().tolist() == [False, True, False], f"{poison}"
        assert torch.equal(residual[1024:2048], before[1024:2048]), f"{poison}"
        assert torch.equal(residual[:1024], clean[:1024]), f"{poison}"
        assert torch.equal(residual[2048:], clean[2048:]), f"{poison}"
        decoded = unpack_signs(words, scales, numel=3000)
        assert bool(decoded[1024:2048].isnan().all()), f"{poison}"


def test_tiny_blocks_are_sent_as_zeros():
    for magnitude in (0.0, 1e-45, 2.0**-101):
        x, residual = torch.full((2000,), -magnitude), torch.zeros(2000)
        words, scales = pack_signs(x, residual=residual)
        assert not scales.any(), f"{magnitude}"
        assert not unpack_signs(words, scales, numel=2000).any(), f"{magnitude}"
        assert torch.equal(residual, x), f"{magnitude}"


def test_bad_arguments_are_refused():
    def good():
        return {"x": torch.zeros(100), "block_size": 1024, "residual": torch.zeros(100)}

    rows = [
        ({"x": torch.zeros(10, 10)}, r"x must be a contiguous 1-d .* \[10, 10\]"),
        ({"x": torch.zeros(100).double()}, "x must be .* float64"),
        ({"residual": torch.zeros(99)}, "residual must be .* with x's length"),
        ({"block_size": 16}, "block_size must be a power of two from 32 to 4096, got 16"),
        ({"block_size": 8192}, "block_size must be a power of two from 32 to 4096, got 8192"),
        ({"block_size": 100}, "block_size must be a power of two from 32 to 4096, got 100"),
    ]
    message = empty_message(100, 1024)
    assert_refused(pack_signs, good, rows, lambda arguments: (*arguments.values(), *message))


def test_bad_messages_are_refused():
    names = ("words", "scales", "block_size", "accumulate", "out", "corrupt")

    def good():
        return dict(zip(names, sample_message(100), strict=True)) | {"numel": 100}

    rows = [
        ({"words": torch.zeros(12, dtype=torch.uint8)}, r"words must be .* shape \[13\] on cpu"),
        ({"words": torch.zeros(13)}, "words must be a contiguous uint8 .* got float32"),
        ({"scales": torch.zeros(2)}, r"scales must be .* shape \[1\] on cpu, got .* \[2\]"),
        ({"scales": torch.zeros(1).half()}, "scales must be a contiguous float32 .* got float16"),
        ({"block_size": 48}, "block_size must be a power of two from 32 to 4096, got 48"),
        ({"out": torch.zeros(100).double()}, "out must be .* got float64"),
        ({"corrupt": torch.tensor(0.0)}, "corrupt must be a 0-d int64 tensor on cpu, got float32"),
    ]
    assert_refused(unpack_signs, good, rows, lambda arguments: tuple(arguments.values())[:-1])
    public = [
        ({"numel": -1}, "numel must be at least 0, got -1"),
        ({"numel": 99}, "out must be of length numel, 99, got 100"),
        ({"out": None, "accumulate": True}, "out must be given to accumulate, got None"),
    ]
    assert_refused(unpack_signs, good, public)


CORRUPT = [-1.0, -1e-45, math.inf, -math.inf]


def test_a_corrupt_message_changes_nothing_on_the_cpu():
    for scale, accumulate in product(CORRUPT, (False, True)):
        arguments = sample_message(5003, accumulate=accumulate)
        arguments[1][3] = scale
        text = "scales must be what pack_signs emits, got"
        assert_corrupt_is_refused("unpack_signs", unpack_signs_reference, arguments, text)


def check_skipped(op, reference, arguments, places, wrong, skipped):
    """Check that a GPU leaves out and counts the skipped entries, whose scales are wrong."""
    *_, accumulate, out, corrupt = arguments
    expected = out.clone()
    reference(*arguments[:-2], expected, corrupt)
    expected = torch.where(skipped, out if accumulate else 0.0, expected)
    arguments[1][places] = wrong
    own = moved(arguments, ON_GPU.device)
    ON_GPU.find(op)(*own)
    assert torch.equal(own[-2].cpu(), expected), f"{wrong}"
    assert int(own[-1]) == int(skipped.sum()), f"{wrong}"


def test_corrupt_blocks_are_skipped_and_counted_on_cuda():
    skipped = torch.zeros(5003, dtype=torch.bool)
    skipped[1024:2048] = skipped[4096:] = True
    for scale, accumulate in product(CORRUPT, (False, True)):
        arguments = sample_message(5003, accumulate=accumulate)
        check_skipped("unpack_signs", unpack_signs_reference, arguments, [1, 4], scale, skipped)


def sample_bins(numel, *, bits=2, block_size=4096, dtypes=(torch.float32,) * 2, make=None):
    x, _, residual, *_ = sample(numel, block_size=block_size, dtypes=dtypes)
    if make is not None:
        make(x)
    codes, means = sizes_of_bins(numel, bits, block_size)
    message = torch.full((codes,), 0xA5, dtype=torch.uint8), torch.full((means,), -1.0)
    return x, bits, block_size, residual, *message


def message_of_bins(
    numel, *, bits=2, block_size=4096, accumulate=False, dtype=torch.float32, special=None
):
    *_, codes, tables = sample_bins(numel, bits=bits, block_size=block_size)
    generator = torch.Generator().manual_seed(numel + bits)
    codes = torch.randint(256, codes.shape, generator=generator, dtype=torch.uint8)
    rows = torch.randn(tables.shape, generator=generator).view(-1, 1 << bits)
    tables = rows.sort(dim=1).values.flatten()
    if special is not None:
        tables[: 1 << bits] = special
    out = torch.randn(numel, generator=generator).to(dtype)
    return codes, tables, bits, block_size, accumulate, out, torch.tensor(0)


def bins_parity(implementation, numel, **options):
    arguments = sample_bins(numel, **options)
    reference = quantize_statistical_reference
    assert_parity(implementation, "quantize_statistical", reference, arguments)


def bins_parity_of_inverse(implementation, numel, **options):
    arguments = message_of_bins(numel, **options)
    reference = dequantize_statistical_reference
    assert_parity(implementation, "dequantize_statistical", reference, arguments)


BITS = [2, 4, 8]


@each_compiled
def test_bins_of_all_lengths(implementation):
    for numel in implementation.lengths[: 7 if implementation.is_slow else None]:
        for bits in BITS:
            bins_parity(implementation, numel, bits=bits)
            bins_parity_of_inverse(implementation, numel, bits=bits, accumulate=numel % 2 == 0)
    for bits, block_size in implementation.cases(BITS, BLOCK_SIZES):
        for numel in (17, 700):
            dtypes = torch.float32, None
            bins_parity(implementation, numel, bits=bits, block_size=block_size, dtypes=dtypes)
            bins_parity_of_inverse(implementation, numel, bits=bits, block_size=block_size)


@each_compiled
def test_bins_of_dtypes(implementation):
    for bits, *dtypes in implementation.cases(BITS, DTYPES, [None, *DTYPES]):
        bins_parity(implementation, 1003, bits=bits, block_size=512, dtypes=dtypes)
    for bits, dtype, accumulate in implementation.cases(BITS, DTYPES, [False, True]):
        bins_parity_of_inverse(implementation, 1003, bits=bits, dtype=dtype, accumulate=accumulate)


def equal(x):
    x.fill_(-3.7)


def on_an_offset(x):
    x.mul_(1e-3).add_(1000)


def with_outliers(x):
    x[::500] *= 1e6


def largest(x):
    x.copy_(x.sign() * 3e38)


def with_special(x):
    x[::61] = torch.tensor(SPECIAL).repeat(99)[: len(x[::61])]


@each_compiled
@pytest.mark.parametrize(
    "make", [torch.Tensor.zero_, torch.Tensor.sign_, equal, on_an_offset, with_outliers, largest,
             lambda x: x.mul_(1e-38), with_special],
)  # fmt: skip
def test_bins_of_any_distribution(implementation, make):
    for bits in BITS:
        bins_parity(implementation, 1303, bits=bits, block_size=512, make=make)
    for special in (torch.tensor([-3e38, -0.0, 0.0, 1e-45]), math.nan, 0.0):
        bins_parity_of_inverse(implementation, 1303, block_size=512, special=special)


@fuzz
@given(st.integers(0, 20_000), st.sampled_from(BITS), st.sampled_from(BLOCK_SIZES),
       st.sampled_from(DTYPES), st.sampled_from([None, *DTYPES]))  # fmt: skip
def test_bins_of_anything(numel, bits, block_size, dtype, kept):
    options = {"bits": bits, "block_size": block_size}
    bins_parity(COMPILED_CPU, numel, **options, dtypes=(dtype, kept))
    bins_parity_of_inverse(COMPILED_CPU, numel, **options, dtype=dtype)


@pytest.mark.parametrize("bits", BITS)
def test_bins_follow_the_papers_rule_in_float64(bits):
    """2**bits bins over six sigma around the mean; an entry becomes the mean of its bin."""
    block_size, num_bins = 1024, 2**bits
    x = torch.randn(3000).pow(3).add(0.5)
    residual = torch.randn(3000)
    acc = (x + residual).double().numpy()
    codes, tables = quantize_statistical(x, bits=bits, block_size=block_size, residual=residual)
    decoded = dequantize_statistical(codes, tables, bits=bits, block_size=block_size, numel=3000)
    assert torch.equal(residual, torch.from_numpy(acc).float() - decoded)
    for begin in range(0, 3000, block_size):
        block = acc[begin : begin + block_size]
        mean, width = block.mean(), 6 * block.std() / num_bins
        place = (block - mean) / width + num_bins / 2
        inside = np.clip(np.floor(place), 0, num_bins - 1).astype(int)
        unit = 2.0**-20 * np.abs(block).max()
        clear = np.abs(place - np.round(place)) > 2 * unit / width  # not at the edge of two bins
        for bin in range(num_bins):
            expected = block[inside == bin].mean() if (inside == bin).any() else 0.0
            found = decoded[begin : begin + block_size].numpy()[(inside == bin) & clear]
            moved = (~clear).sum() * width / max(1, (inside == bin).sum())
            assert np.abs(found - expected).max(initial=0.0) <= unit + moved


CORRUPT_MEANS = [(-1, math.inf), (4, -math.inf), (5, 9.0), (5, math.nan), (slice(4, 8), 1e-40)]


def test_a_corrupt_table_changes_nothing_on_the_cpu():
    for (place, mean), accumulate in product(CORRUPT_MEANS, (False, True)):
        arguments = message_of_bins(5003, accumulate=accumulate)
        arguments[1][place] = mean
        text = "tables must be what quantize_statistical emits"
        reference = dequantize_statistical_reference
        assert_corrupt_is_refused("dequantize_statistical", reference, arguments, text)


def test_corrupt_means_are_skipped_and_counted_on_cuda():
    skipped = torch.arange(5003) >= 4096
    for (place, mean), accumulate in product(CORRUPT_MEANS, (False, True)):
        arguments = message_of_bins(5003, accumulate=accumulate)
        reference = dequantize_statistical_reference
        check_skipped("dequantize_statistical", reference, arguments, place, mean, skipped)


def test_bad_bins_are_refused():
    def good():
        return {"x": torch.zeros(100), "bits": 2, "block_size": 64, "residual": torch.zeros(100)}

    rows = [
        ({"x": torch.zeros(100).double()}, "x must be .* float64"),
        ({"residual": torch.zeros(99)}, "residual must be .* with x's length"),
        ({"block_size": 8192}, "block_size must be a power of two from 32 to 4096, got 8192"),
        ({"bits": 3}, "bits must be 2, 4 or 8, got 3"),
    ]
    message = sample_bins(100, block_size=64)[4:]
    assert_refused(quantize_statistical, good, rows, lambda a: (*a.values(), *message))
    names = ("codes", "tables", "bits", "block_size", "accumulate", "out", "corrupt")

    def good_message():
        return dict(zip(names, message_of_bins(5003), strict=True)) | {"numel": 5003}

    rows = [
        ({"codes": torch.zeros(1250, dtype=torch.uint8)}, r"codes must be .* \[1251\].* \[1250\]"),
        ({"tables": torch.zeros(9)}, r"tables must be a contiguous float32 .* \[8\].* \[9\]"),
        ({"tables": torch.zeros(8).half()}, "tables must be .* got float16"),
        ({"bits": 16}, "bits must be 2, 4 or 8, got 16"),
        ({"out": torch.zeros(5003).double()}, "out must be .* got float64"),
    ]
    assert_refused(dequantize_statistical, good_message, rows, lambda a: tuple(a.values())[:-1])
