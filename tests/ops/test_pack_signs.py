"""``pack_signs`` and its inverse: samples for the parity harness, and tests of these ops alone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel.ops import pack_signs, unpack_signs
from pyparallel.ops.pack_signs import pack_signs_reference, unpack_signs_reference
from tests.ops.parity import (
    COMPILED_CPU,
    DTYPES,
    EMULATED_CUDA,
    IMPLEMENTATIONS,
    LENGTHS,
    assert_parity,
    require_compiled,
    short_error,
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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("numel", LENGTHS)
def test_lengths(implementation, numel):
    parity(implementation, sample(numel))
    parity(implementation, sample(numel, dtypes=(torch.float32, None)))
    for accumulate in (False, True):
        parity_of_inverse(implementation, sample_message(numel, accumulate=accumulate))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_block_sizes(implementation, block_size):
    for numel in (17, 4096, 4999, 8192 + 8):
        parity(implementation, sample(numel, block_size=block_size))
        parity_of_inverse(implementation, sample_message(numel, block_size=block_size))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual_dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("block_size", [64, 1024, 2048])
def test_dtypes(implementation, dtype, residual_dtype, block_size):
    parity(implementation, sample(5003, block_size=block_size, dtypes=(dtype, residual_dtype)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_dtypes_of_the_inverse(implementation, dtype, accumulate):
    parity_of_inverse(implementation, sample_message(5003, dtype=dtype, accumulate=accumulate))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-39, 1e-30, 1e30, 1e37, math.inf, math.nan])
def test_magnitudes(implementation, scale):
    parity(implementation, sample(3000, scale=scale))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("special", SPECIAL, ids=str)
def test_special_elements(implementation, special):
    x, *rest = sample(3000, block_size=128)
    x[1000] = special  # one block among ordinary ones
    parity(implementation, (x, *rest))
    parity(implementation, (torch.full_like(x, special), *rest))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("scale", [0.0, -0.0, 1e-45, math.nan], ids=str)
def test_special_scales(implementation, scale):
    words, scales, *rest = sample_message(3000)
    scales[1] = scale
    parity_of_inverse(implementation, (words, scales, *rest))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_unaligned_buffers(implementation):
    x, block_size, residual, words, scales = sample(5003)
    parity(implementation, (x[1:], block_size, residual[1:], words, scales))
    words, scales, block_size, accumulate, out, corrupt = sample_message(5003)
    arguments = words[1:], scales, block_size, accumulate, out[8:], corrupt
    parity_of_inverse(implementation, arguments)


@settings(deadline=None)
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
        x[index : index + 1] = value
    parity(COMPILED_CPU, (x, *rest))


@settings(deadline=None)
@given(st.integers(0, 40_000), st.sampled_from(BLOCK_SIZES), st.booleans(), st.sampled_from(DTYPES))
def test_compiled_cpu_unpacks_anything(numel, block_size, accumulate, dtype):
    arguments = sample_message(numel, block_size=block_size, accumulate=accumulate, dtype=dtype)
    parity_of_inverse(COMPILED_CPU, arguments)


@pytest.mark.parametrize("numel", LENGTHS)
def test_words_are_those_of_numpy(numel):
    x = torch.randn(numel)
    x[::7], x[1::7], x[2::7] = 0.0, -0.0, math.nan
    words, _ = pack_signs(x)
    assert np.array_equal(words.numpy(), np.packbits(x.numpy() >= 0, bitorder="little"))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_scales_are_mean_magnitudes(block_size):
    x = torch.randn(3 * block_size + 5)
    _, scales = pack_signs(x, block_size=block_size)
    expected = torch.stack([part.double().abs().mean() for part in x.split(block_size)])
    torch.testing.assert_close(scales.double(), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("numel", [1, 1000, 5003])
def test_unsent_entries_stay_in_the_residual(numel):
    x, residual = torch.randn(numel), torch.randn(numel)
    accumulated = x + residual
    words, scales = pack_signs(x, residual=residual)
    sent = unpack_signs(words, scales, numel=numel)
    assert torch.equal(sent.sign(), torch.where(accumulated >= 0, 1.0, -1.0))
    assert torch.equal(residual, accumulated - sent)


def test_accumulate_adds():
    words, scales = pack_signs(torch.randn(5003))
    sent, out = unpack_signs(words, scales, numel=5003), torch.randn(5003)
    expected = out + sent
    added = unpack_signs(words, scales, numel=5003, out=out, accumulate=True)
    assert added is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_feedback_loses_nothing(dtype):
    numel = 3000
    generator = torch.Generator().manual_seed(1)
    residual = torch.zeros(numel)
    came, sent = torch.zeros(numel).double(), torch.zeros(numel).double()
    largest = 0.0
    for _ in range(1000):
        x = torch.randn(numel, generator=generator).to(dtype)
        words, scales = pack_signs(x, residual=residual)
        came += x
        sent += unpack_signs(words, scales, numel=numel)
        largest = max(largest, float(residual.abs().max()))
    assert largest < 100  # the residual stays bounded
    # Two roundings a step, of numbers below twice the largest residual.
    torch.testing.assert_close(
        sent + residual, came, rtol=0.0, atol=2 * 1000 * 2 * largest * 2**-24
    )


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan, 3e38])
def test_a_block_with_inf_or_nan_does_not_affect_others(poison):
    x, residual = torch.randn(3000), torch.randn(3000)
    x[1100:1200] = poison  # 3e38: finite, but its sum is not
    before, clean = residual.clone(), residual.clone()
    _, scales = pack_signs(x, residual=residual)
    words, _ = pack_signs(torch.where(x.abs() < 1e38, x, 0.0), residual=clean)
    assert scales.isnan().tolist() == [False, True, False]
    assert torch.equal(residual[1024:2048], before[1024:2048])
    assert torch.equal(residual[:1024], clean[:1024])
    assert torch.equal(residual[2048:], clean[2048:])
    assert bool(unpack_signs(words, scales, numel=3000)[1024:2048].isnan().all())


@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 2.0**-101])
def test_tiny_blocks_are_sent_as_zeros(magnitude):
    x, residual = torch.full((2000,), -magnitude), torch.zeros(2000)
    words, scales = pack_signs(x, residual=residual)
    assert not scales.any()
    assert not unpack_signs(words, scales, numel=2000).any()
    assert torch.equal(residual, x)


def test_equal_magnitudes_are_decoded_exactly():
    x = torch.where(torch.rand(4096) < 0.5, 1.5, -1.5)
    residual = torch.zeros(4096)
    words, scales = pack_signs(x, residual=residual)
    assert torch.equal(unpack_signs(words, scales, numel=4096), x)
    assert not residual.any()


def test_opcheck():
    operators = torch.ops.pyparallel
    torch.library.opcheck(operators.pack_signs.default, sample(3000))
    torch.library.opcheck(operators.pack_signs.default, sample(3000, dtypes=(torch.float32, None)))
    torch.library.opcheck(operators.unpack_signs.default, sample_message(3000))


def test_compiles_into_a_graph_without_breaks():
    x, _, residual, *_ = sample(3000)
    expected_residual = residual.clone()
    expected = pack_signs(x, residual=expected_residual)

    def there_and_back(x, residual):
        message = pack_signs(x, residual=residual)
        return *message, unpack_signs(*message, numel=3000)

    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    words, scales, out = compiled(x, residual)
    assert torch.equal(words, expected[0])
    assert torch.equal(scales, expected[1])
    assert torch.equal(residual, expected_residual)
    assert torch.equal(out, unpack_signs(*expected, numel=3000))


@pytest.mark.parametrize(
    ("changes", "error_text"),
    [
        ({"x": torch.zeros(10, 10)}, r"x must be a contiguous 1-d .* \[10, 10\]"),
        ({"x": torch.zeros(100).double()}, "x must be .* float64"),
        ({"residual": torch.zeros(99)}, "residual must be .* with x's length"),
        ({"block_size": 16}, "block_size must be a power of two from 32 to 4096, got 16"),
        ({"block_size": 8192}, "block_size must be a power of two from 32 to 4096, got 8192"),
        ({"block_size": 100}, "block_size must be a power of two from 32 to 4096, got 100"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_refused(changes, error_text):
    arguments = {"x": torch.zeros(100), "residual": torch.zeros(100), "block_size": 1024, **changes}
    with pytest.raises(ValueError, match=error_text):
        pack_signs(**arguments)
    require_compiled("cpu")
    message = dict(zip(("words", "scales"), empty_message(100, 1024), strict=True))
    with pytest.raises(RuntimeError, match=short_error(error_text)):
        torch.ops.pyparallel.pack_signs(**arguments, **message)


@pytest.mark.parametrize(
    ("changes", "error_text"),
    [
        ({"words": torch.zeros(12, dtype=torch.uint8)}, r"words must be .* shape \[13\] on cpu"),
        ({"words": torch.zeros(13)}, "words must be a contiguous uint8 .* got float32"),
        ({"scales": torch.zeros(2)}, r"scales must be .* shape \[1\] on cpu, got .* \[2\]"),
        ({"scales": torch.zeros(1).half()}, "scales must be a contiguous float32 .* got float16"),
        ({"block_size": 48}, "block_size must be a power of two from 32 to 4096, got 48"),
        ({"out": torch.zeros(100).double()}, "out must be .* got float64"),
        ({"corrupt": torch.tensor(0.0)}, "corrupt must be a 0-d int64 tensor on cpu, got float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_messages_are_refused(changes, error_text):
    names = ("words", "scales", "block_size", "accumulate", "out", "corrupt")
    arguments = {**dict(zip(names, sample_message(100), strict=True)), **changes}
    with pytest.raises(ValueError, match=error_text):
        unpack_signs(**arguments, numel=100)
    require_compiled("cpu")
    with pytest.raises(RuntimeError, match=short_error(error_text)):
        torch.ops.pyparallel.unpack_signs(**arguments)


@pytest.mark.parametrize(
    ("changes", "error_text"),
    [
        ({"numel": -1}, "numel must be at least 0, got -1"),
        ({"numel": 99}, "out must be of length numel, 99, got 100"),
        ({"out": None, "accumulate": True}, "out must be given to accumulate, got None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_inconsistent_arguments_are_refused(changes, error_text):
    words, scales, *_ = sample_message(100)
    with pytest.raises(ValueError, match=error_text):
        unpack_signs(words, scales, **{"numel": 100, "out": torch.zeros(100), **changes})


CORRUPT = [-1.0, -1e-45, math.inf, -math.inf]


@pytest.mark.parametrize("scale", CORRUPT)
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_corrupt_message_changes_nothing_on_the_cpu(scale, accumulate):
    words, scales, block_size, _, out, corrupt = sample_message(5003, accumulate=accumulate)
    scales[3] = scale
    before = out.clone()
    for op in (torch.ops.pyparallel.unpack_signs, unpack_signs_reference):
        with pytest.raises(RuntimeError, match="scales must be what pack_signs emits, got"):
            op(words, scales, block_size, accumulate, out, corrupt)
    assert torch.equal(out, before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the emulator stands in for a GPU")
@pytest.mark.parametrize("scale", CORRUPT)
@pytest.mark.parametrize("accumulate", [False, True])
def test_corrupt_blocks_are_skipped_and_counted_on_cuda(scale, accumulate):
    words, scales, block_size, _, out, corrupt = sample_message(5003, accumulate=accumulate)
    expected, clean = out.clone(), scales.clone()
    unpack_signs_reference(words, clean, block_size, accumulate, expected, corrupt)
    skipped = torch.zeros(5003, dtype=torch.bool)
    skipped[1024:2048] = skipped[4096:] = True
    expected = torch.where(skipped, out if accumulate else 0.0, expected)
    scales[1] = scales[4] = scale
    EMULATED_CUDA.find("unpack_signs")(words, scales, block_size, accumulate, out, corrupt)
    assert torch.equal(out, expected)
    assert int(corrupt) == int(skipped.sum())
