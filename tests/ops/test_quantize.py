"""``quantize``, ``dequantize``, ``dequantize_sum``: samples for the parity harness, and tests."""

from itertools import cycle, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyparallel.ops import dequantize, dequantize_sum, quantize
from pyparallel.ops._formats import find_format
from pyparallel.ops._philox import as_seed
from pyparallel.ops.quantize import (
    dequantize_reference,
    dequantize_sum_reference,
    quantize_reference,
)
from tests.ops.parity import (
    COMPILED,
    COMPILED_CPU,
    DTYPES,
    ON_GPU,
    assert_corrupt_is_refused,
    assert_parity,
    assert_refused,
    each_compiled,
    fuzz,
    moved,
)

FORMATS = [(8, "int"), (4, "int"), (8, "e4m3"), (8, "e5m2"), (2, "ternary"),
           (4, "e3m0"), (8, "natural")]  # fmt: skip
BLOCK_SIZES = [32, 64, 128, 256, 512, 1024, 2048, 4096]
SEEDS = [None, 2**63 + 5]
PACKED = [FORMATS[0], FORMATS[1], FORMATS[4]]  # one, two and four codes to a byte
SCALED = FORMATS[:-1]
each_format = pytest.mark.parametrize("kind", FORMATS, ids=str)


def prepare(x, bits, format, block_size, residual, seed, offset=0):
    """Return arguments of the op itself; outputs are filled with garbage."""
    kind = find_format(bits, format)
    codes = torch.full((kind.num_codes(x.numel()),), 85, dtype=kind.dtype)
    scales = torch.full((kind.num_scales(x.numel(), block_size),), float("nan"))
    seed, offset = as_seed(seed), torch.tensor(offset)
    return x, bits, format, block_size, residual, seed, offset, codes, scales


def sample(numel, *, dtype=torch.float32, residual_dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(numel)
    x, lost = (scale * torch.randn(numel, generator=generator) for _ in range(2))
    residual = None if residual_dtype is None else (lost / 100).to(residual_dtype)
    return x.to(dtype), residual


def quantize_parity(implementation, *arguments):
    assert_parity(implementation, "quantize", quantize_reference, prepare(*arguments))


@each_compiled
def test_lengths(implementation):
    for numel, (bits, format) in product(implementation.lengths, PACKED):
        x, residual = sample(numel)
        quantize_parity(implementation, x, bits, format, 256, residual, 2**63 + 5, 2**33 + 1)


@each_compiled
def test_dtypes(implementation):
    rows = implementation.cases(DTYPES, [None, *DTYPES], FORMATS, SEEDS)
    for dtype, residual_dtype, kind, seed in rows:
        x, residual = sample(2003, dtype=dtype, residual_dtype=residual_dtype)
        quantize_parity(implementation, x, *kind, 128, residual, seed)


@each_compiled
def test_block_sizes(implementation):
    rows = product(BLOCK_SIZES, FORMATS)
    for block_size, kind in zip(BLOCK_SIZES, cycle(FORMATS)) if implementation.is_slow else rows:
        quantize_parity(implementation, sample(9001)[0], *kind, block_size, None, None)


def special_blocks():
    """Ordinary, zero, tiny, denormal, equal, spread, inf, nan, huge and short blocks of 32."""
    ordinary = torch.randn(32, generator=torch.Generator().manual_seed(0))
    spread = ordinary.sign() * torch.logspace(-12, 0, 32)
    special = []
    for value in (float("inf"), float("-inf"), float("nan")):
        special.append(ordinary.clone())
        special[-1][7] = value
    rows = [
        *(ordinary, 0 * ordinary, -0.0 * ordinary.abs(), 1e-31 * ordinary, 1e-40 * ordinary),
        *(ordinary.new_full((32,), 0.7), spread, spread.flip(0), 7e37 * ordinary.sign(), *special),
        *(2.0**-100 * ordinary.sign(), 2.0**-101 * ordinary.sign(), ordinary[:5]),
    ]
    return torch.cat(rows)


@each_compiled
def test_special_blocks(implementation):
    x = special_blocks()
    for kind, seed in product(FORMATS, SEEDS):
        quantize_parity(implementation, x, *kind, 32, None, seed)
        quantize_parity(implementation, x, *kind, 32, torch.full_like(x, 1e-3), seed)
        quantize_parity(implementation, torch.zeros_like(x), *kind, 32, x.clone(), seed)


@fuzz
@given(
    st.integers(0, 70_000),
    st.sampled_from(DTYPES),
    st.sampled_from([None, *DTYPES]),
    st.sampled_from(FORMATS),
    st.sampled_from(BLOCK_SIZES),
    st.none() | st.integers(0, 2**64 - 1),
    st.integers(0, 2**63 - 1),
    st.sampled_from([1.0, 1e-30, 1e4]),
)
def test_compiled_cpu_on_anything(
    numel, dtype, residual_dtype, kind, block_size, seed, offset, scale
):
    x, residual = sample(numel, dtype=dtype, residual_dtype=residual_dtype, scale=scale)
    quantize_parity(COMPILED_CPU, x, *kind, block_size, residual, seed, offset)


def message(numel, bits, format, block_size=256, **options):
    x, _ = sample(numel)
    return quantize(x, bits=bits, format=format, block_size=block_size, **options)


def decode_parity(implementation, kind, codes, scales, block_size, accumulate, out):
    counter = torch.zeros((), dtype=torch.int64)
    arguments = codes, scales, *kind, block_size, accumulate, out, counter
    assert_parity(implementation, "dequantize", dequantize_reference, arguments)


@each_compiled
def test_decoding_lengths(implementation):
    for numel, kind in product(implementation.lengths, PACKED):
        codes, scales = message(numel, *kind)
        decode_parity(implementation, kind, codes, scales, 256, True, sample(numel + 1)[0][1:])


@each_compiled
def test_decoding_dtypes_and_blocks(implementation):
    rows = implementation.cases(DTYPES, FORMATS, [32, 1024, 4096], [False, True])
    for dtype, kind, block_size, accumulate in rows:
        codes, scales = message(9001, *kind, block_size)
        scales[-1:] = float("nan")
        out = sample(9001, dtype=dtype)[0]
        decode_parity(implementation, kind, codes, scales, block_size, accumulate, out)


def is_emitted(kind, codes):
    form = find_format(*kind)
    corrupt = form.is_corrupt(form.unpack(codes, codes.numel() * 8 // kind[0]))
    return ~corrupt.view(codes.numel(), -1).any(dim=1)


@each_compiled
def test_every_code_is_decoded(implementation):
    for kind in FORMATS:
        codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
        codes = codes[is_emitted(kind, codes)].view(find_format(*kind).dtype)
        numel = codes.numel() * 8 // kind[0]
        scales = torch.full((find_format(*kind).num_scales(numel, 32),), 0.3)
        decode_parity(implementation, kind, codes, scales, 32, False, torch.empty(numel))


@fuzz
@given(
    st.integers(0, 70_000),
    st.sampled_from(DTYPES),
    st.sampled_from(FORMATS),
    st.sampled_from(BLOCK_SIZES),
    st.booleans(),
)
def test_compiled_cpu_decodes_anything(numel, dtype, kind, block_size, accumulate):
    codes, scales = message(numel, *kind, block_size, seed=numel)
    out = sample(numel, dtype=dtype)[0]
    decode_parity(COMPILED_CPU, kind, codes, scales, block_size, accumulate, out)


def in_rows(num_rows, entries, kind, block_size, extra=16):
    """Return codes and scales, (rows, ...), that follow each other in rows of bytes, all 85."""
    form = find_format(*kind)
    num_codes = form.num_codes(entries)
    begin = -(-num_codes // 16) * 16
    end = begin + 4 * form.num_scales(entries, block_size)
    rows = torch.full((num_rows, end + extra), 85, dtype=torch.uint8)
    return rows[:, :num_codes].view(form.dtype), rows[:, begin:end].view(torch.float32)


def sum_sample(numel, kind=(8, "int"), count=3, dtype=torch.float32, block_size=64, extra=16):
    """Return arguments of dequantize_sum: messages whose codes and scales share rows of bytes."""
    codes, scales = in_rows(count, numel, kind, block_size, extra)
    for index in range(count):
        x = (index + 1) * sample(numel + index)[0][index:]
        one = quantize(x, **named(kind), block_size=block_size)
        codes[index], scales[index] = one
    out = torch.full((numel,), 7.0, dtype=dtype)
    return codes, scales, *kind, block_size, float(count), out, torch.zeros((), dtype=torch.int64)


@each_compiled
def test_sums_of_messages(implementation):
    rows = implementation.cases(DTYPES, FORMATS, [1, 3, 4, 9], [0, 7, 1025, 20_001], [16, 4])
    for dtype, kind, count, numel, extra in rows:  # rows that are aligned, and that are not
        arguments = sum_sample(numel, kind, count, dtype, extra=extra)
        assert_parity(implementation, "dequantize_sum", dequantize_sum_reference, arguments)


@each_format
def test_a_sum_refuses_a_corrupt_message_on_the_cpu_and_a_gpu_leaves_it_out(kind):
    for wrong, wrong_scales, count in corrupt_messages(kind):
        right, right_scales = message(101, *kind, 32)
        codes, scales = torch.stack([right, wrong]), torch.stack([right_scales, wrong_scales])
        options = {**named(kind), "block_size": 32, "numel": 101}
        arguments = codes, scales, *kind, 32, 1.0, torch.full((101,), 5.0), torch.tensor(1000)
        if count and not torch.cuda.is_available():
            with pytest.raises(RuntimeError, match="codes and scales must be what quantize emits"):
                dequantize_sum(codes, scales, **options, out=arguments[-2])
            assert torch.equal(arguments[-2], torch.full((101,), 5.0))
        arguments = moved(arguments, ON_GPU.device)
        ON_GPU.find("dequantize_sum")(*arguments)
        expected = torch.zeros(101, device=ON_GPU.device)
        for index in range(2):
            each = [tensor[index] for tensor in arguments[:2]]
            counter = torch.zeros_like(arguments[-1])
            ON_GPU.find("dequantize")(*each, *kind, 32, True, expected, counter)
        assert int(arguments[-1]) == 1000 + count
        assert torch.equal(arguments[-2], expected)


@each_compiled
def test_messages_in_rows(implementation):
    """Each row is as a message of its own would be, but for the draws, which go on."""
    cases = implementation.cases(
        FORMATS, [None, *DTYPES[:2]], SEEDS, [0, 1000, 4096, 5001], [16, 4]
    )
    for kind, residual_dtype, seed, numel, extra in cases:
        x, residual = sample(numel, residual_dtype=residual_dtype)
        *head, _, _ = prepare(x, *kind, 64, residual, seed)
        codes, scales = in_rows(3, 1728, kind, 64, extra)
        assert_parity(implementation, "quantize", quantize_reference, (*head, codes, scales))
        quantize_reference(*head, codes, scales)
        one_piece = prepare(x, *kind, 64, sample(numel, residual_dtype=residual_dtype)[1], seed)
        quantize_reference(*one_piece)
        size = one_piece[-2].numel()
        assert torch.equal(codes.reshape(-1)[:size], one_piece[-2])
        decode_parity(implementation, kind, codes, scales, 64, numel % 2 == 0, torch.ones(numel))
    with pytest.raises(RuntimeError, match="codes: expected rows of whole blocks"):
        COMPILED_CPU.find("quantize")(*head, codes[:, 1:], scales)
    with pytest.raises(RuntimeError, match="scales: expected as many rows as codes"):
        COMPILED_CPU.find("quantize")(*head, codes, scales[1:])


@each_format
def test_unaligned_buffers(kind):
    for seed in SEEDS:
        x, residual = sample(40_001)
        expected_residual = residual[1:].clone()
        expected = quantize(x[1:].clone(), **named(kind), residual=expected_residual, seed=seed)
        memory = torch.empty(expected[0].numel() + 1, dtype=expected[0].dtype)
        out = memory[1:], torch.empty_like(expected[1])
        quantize(x[1:], **named(kind), residual=residual[1:], seed=seed, out=out)
        torch.testing.assert_close(out, expected, rtol=0.0, atol=0.0)
        assert torch.equal(residual[1:], expected_residual), f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [(8, "int"), (4, "int")], ids=str)
def test_more_elements_than_32_bits_count(kind):
    numel = 2**31 + 5
    x = torch.ones(numel, dtype=torch.bfloat16)
    x[-3:] = torch.tensor([0.5, -1.0, 1.0])
    codes, scales = quantize(x, **named(kind), seed=3)
    out = torch.empty_like(x)
    dequantize(codes, scales, **named(kind), numel=numel, out=out)
    assert torch.equal(out[-2:], x[-2:])
    assert out[2**31 - 7] == 1


def named(kind):
    return {"bits": kind[0], "format": kind[1]}


def round_trip(x, kind, **options):
    codes, scales = quantize(x, **named(kind), **options)
    block = {"block_size": options.get("block_size", 256)}
    return dequantize(codes, scales, **named(kind), **block, numel=x.numel())


@each_format
def test_decoded_values_are_close(kind):
    x, _ = sample(10_000)
    absmax = torch.nn.functional.pad(x, (0, 240)).view(-1, 256).abs().amax(dim=1)
    absmax = absmax.repeat_interleave(256)[:10_000]
    if kind[1] in ("int", "ternary"):
        bound = absmax / find_format(*kind).largest / 2
    elif kind[1] in ("natural", "e3m0"):
        bound = x.abs() / 3 + (0 if kind[1] == "natural" else absmax / 128)
    else:
        half_ulp = 2.0 ** -(1 + find_format(*kind).mantissa_bits)
        bound = x.abs() * half_ulp + absmax * 1e-5
        bound += absmax * (2**-10 / 448 if kind[1] == "e4m3" else 0)
    assert ((round_trip(x, kind) - x).abs() <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_floats_are_those_of_torch(format):
    kind = find_format(8, format)
    generator = torch.Generator().manual_seed(0)
    # Every code, the middles between them (ties), and numbers of all magnitudes.
    numbers = kind.decode(torch.arange(256, dtype=torch.int16).to(torch.uint8))
    numbers = numbers[numbers.abs() <= kind.largest].sort().values
    middles = (numbers[1:] + numbers[:-1]) / 2
    spread = torch.randn(3000, generator=generator) * torch.logspace(-6, 2, 3000)
    x = torch.cat([numbers, middles, spread.clamp(-kind.largest, kind.largest)])
    x = torch.nn.functional.pad(x, (0, -x.numel() % 31)).view(-1, 31)
    # With the largest number in each block the scale is exactly 1.
    x = torch.nn.functional.pad(x, (0, 1), value=kind.largest).flatten()
    codes, scales = quantize(x, bits=8, format=format, block_size=32)
    assert torch.equal(scales, torch.ones_like(scales))
    assert torch.equal(codes, x.to(kind.kind).view(torch.uint8))
    assert torch.equal(round_trip(x, (8, format), block_size=32), x.to(kind.kind).float())


def test_e3m0_is_rounded_to_the_nearest_power():
    """A block with 64 has scale 1: the numbers are 0 and 1, 2, 4, ... 64; ties go to even codes."""
    numbers = torch.tensor([0.0, *(2.0**k for k in range(7))])
    x = torch.linspace(0, 64, 4097)
    x = torch.nn.functional.pad(x, (0, -x.numel() % 31)).view(-1, 31)
    x = torch.nn.functional.pad(x, (0, 1), value=64.0).flatten()
    x = torch.where(torch.arange(x.numel()) % 2 == 0, x, -x)
    distance = (x.abs()[:, None] - numbers).abs()
    nearest = distance.min(dim=1).values
    decoded = round_trip(x, (4, "e3m0"), block_size=32)
    assert torch.isin(decoded.abs(), numbers).all()
    assert torch.equal((decoded - x).abs(), nearest)
    assert torch.equal(decoded.sign(), torch.where(decoded == 0, 0.0, x.sign()))
    is_tie = (distance == nearest[:, None]).sum(dim=1) > 1
    assert torch.isin(decoded[is_tie].abs(), numbers[::2]).all()


# Fractions of the largest number: normal, near and below the float formats' subnormals, tiny.
FRACTIONS = [0.3317, -0.71, 0.0143, 2.1e-5, 3.3e-6, 1.7e-9, -4e-8]


@each_format
def test_stochastic_rounding_is_unbiased(kind):
    largest = find_format(*kind).largest
    for fraction in FRACTIONS:
        blocks = torch.full((4_000, 32), fraction * largest)
        blocks[:, 0] = largest  # the scale is exactly 1
        decoded = round_trip(blocks.flatten(), kind, block_size=32, seed=7).view(-1, 32)[:, 1:]
        draws, value = decoded.double().flatten(), float(blocks[0, 1])
        values = draws.unique()
        assert values.numel() <= 2, f"{fraction}"
        gap = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}.get(kind[1], 1.0)  # of the smallest codes
        if values.numel() == 2:
            assert values[0] <= value <= values[1], f"{fraction}"
            gap = float(values[1] - values[0])
        # 16 random bits resolve half a unit at best.
        error = abs(float(draws.mean()) - value)
        assert error <= 4 * float(draws.std()) / draws.numel() ** 0.5 + gap / 2**17, f"{fraction}"


@each_format
def test_draws_follow_from_seed_and_offset(kind):
    x, _ = sample(3000)
    draw = [quantize(x, **named(kind), seed=seed, offset=offset)[0] for seed, offset in
            [(1, 0), (1, 0), (1, torch.tensor(0)), (1, 1), (2, 0), (1, 2**32)]]  # fmt: skip
    assert torch.equal(draw[0], draw[1])
    assert torch.equal(draw[0], draw[2])
    for other in draw[3:]:
        assert (draw[0] != other).float().mean() > 0.05


@pytest.mark.parametrize("kind", SCALED, ids=str)
def test_inf_and_nan_propagate_but_not_to_the_residual(kind):
    for value in (float("inf"), float("-inf"), float("nan")):
        x, residual = sample(512)
        x[300] = value
        before = residual.clone()
        codes, scales = quantize(x, **named(kind), residual=residual)
        decoded = dequantize(codes, scales, **named(kind), numel=512)
        assert decoded[:256].isfinite().all(), f"{value}"
        assert decoded[256:].isnan().all(), f"{value}"
        assert torch.equal(residual[256:], before[256:]), f"{value}"
        assert not torch.equal(residual[:256], before[:256]), f"{value}"


@each_format
def test_tiny_values_stay_in_the_residual(kind):
    for value, seed in product((0.0, 1e-40, 2.0**-101), SEEDS):
        x, residual = torch.full((100,), value), torch.zeros(100)
        codes, scales = quantize(x, **named(kind), residual=residual, seed=seed)
        assert not codes.view(torch.uint8).any(), f"{value}, seed {seed}"
        assert not scales.any(), f"{value}, seed {seed}"
        assert torch.equal(residual, x), f"{value}, seed {seed}"


def corrupt_messages(kind):
    """Yield messages of 101 entries with one error, and the number of corrupt entries."""
    codes, scales = message(101, *kind, 32)
    codes = torch.where(is_emitted(kind, codes.view(torch.uint8)), codes, codes[:1])
    # The corrupt codes of a byte, and of the last one, which has one entry.
    never = {(8, "int"): {0x80: (1, 1)}, (4, "int"): {0x08: (1, 1), 0x80: (1, 0), 0x88: (2, 1)},
             (8, "e4m3"): {0x7F: (1, 1), 0xFF: (1, 1)},
             (8, "e5m2"): dict.fromkeys([0x7C, 0x7D, 0xFC, 0xFF], (1, 1)),
             (2, "ternary"): {0b11: (1, 1), 0b111001: (1, 0), 0b11000000: (1, 0), 0xFF: (4, 1)},
             (4, "e3m0"): {0x08: (1, 1), 0x80: (1, 0), 0x88: (2, 1)},
             (8, "natural"): {0x80: (1, 1), 0xFF: (1, 1)}}[kind]  # fmt: skip
    for pattern, found in never.items():
        for place in (0, codes.numel() // 2, codes.numel() - 1):
            wrong = codes.clone()
            wrong.view(torch.uint8)[place] = pattern
            yield wrong, scales, found[place == codes.numel() - 1]
    if kind not in SCALED:
        return
    for value in (-1e-3, float("inf"), float("-inf")):
        for block, count in ((0, 32), (3, 5)):
            wrong_scales = scales.clone()
            wrong_scales[block] = value
            yield codes, wrong_scales, count


@each_format
def test_the_cpu_refuses_a_corrupt_message_without_writing(kind):
    for (codes, scales, count), accumulate in product(corrupt_messages(kind), (False, True)):
        if count == 0:
            continue
        out = torch.full((101,), 5.0)
        arguments = codes, scales, *kind, 32, accumulate, out, torch.tensor(0)
        text = "codes and scales must be what quantize emits, got"
        assert_corrupt_is_refused("dequantize", dequantize_reference, arguments, text)


@pytest.mark.parametrize("implementation", COMPILED[1:], ids=str)
@each_format
def test_gpus_skip_and_count_corrupt_entries(implementation, kind):
    form = find_format(*kind)
    for (codes, scales, count), accumulate in product(corrupt_messages(kind), (False, True)):
        out, counter = torch.full((101,), 5.0), torch.tensor(1000)
        arguments = codes, scales, *kind, 32, accumulate, out, counter
        arguments = moved(arguments, implementation.device)
        implementation.find("dequantize")(*arguments)
        assert int(arguments[-1]) == 1000 + count
        each = form.unpack(codes, 101)
        scale = (scales if kind in SCALED else torch.ones(4)).repeat_interleave(32)[:101]
        corrupt = form.is_corrupt(each) | (scale < 0) | scale.isinf()
        assert int(corrupt.sum()) == count
        old = 5.0 if accumulate else 0.0
        expected = torch.where(corrupt, torch.tensor(old), form.decode(each) * scale + old)
        assert torch.equal(arguments[-2].cpu(), expected)


@each_format
def test_gpus_find_the_corrupt_codes_among_all(kind):
    form = find_format(*kind)
    # In each place of a word.
    codes = torch.cat([torch.arange(256).roll(turn) for turn in range(4)])
    codes = codes.to(torch.uint8).view(form.dtype)
    numel = codes.numel() * 8 // kind[0]
    scales = torch.full((form.num_scales(numel, 32),), 0.3)
    out, counter = torch.full((numel,), 5.0), torch.tensor(0)
    arguments = moved((codes, scales, *kind, 32, True, out, counter), ON_GPU.device)
    ON_GPU.find("dequantize")(*arguments)
    each = form.unpack(codes, numel)
    corrupt = form.is_corrupt(each)
    assert int(arguments[-1]) == int(corrupt.sum()) > 0
    numbers = form.decode(each) * (scales[0] if kind in SCALED else 1) + 5
    expected = torch.where(corrupt, torch.tensor(5.0), numbers)
    torch.testing.assert_close(arguments[-2].cpu(), expected, rtol=0, atol=0, equal_nan=True)


ENCODING = ("x", "bits", "format", "block_size", "residual", "seed", "offset", "codes", "scales")
DECODING = ("codes", "scales", "bits", "format", "block_size", "accumulate", "out", "corrupt")


def test_bad_arguments_of_quantize_are_refused():
    def good():
        arguments = prepare(*sample(100)[:1], 8, "int", 32, torch.zeros(100), 1)
        public = dict(zip(ENCODING, arguments, strict=True))
        return public | {"out": (public.pop("codes"), public.pop("scales"))}

    def direct(arguments):
        *first, out = arguments.values()
        return *first, *out

    codes, scales = torch.zeros(100).char(), torch.zeros(4)
    rows = [
        ({"x": torch.zeros(10, 10)}, r"x must be a contiguous 1-d .* \[10, 10\]"),
        ({"x": torch.zeros(100).double()}, "x must be .* got float64"),
        ({"residual": torch.zeros(99)}, "residual must be .* x's length"),
        ({"bits": 3}, "bits and format must be 8 and int, 4 and int, .*, got 3 and int"),
        ({"bits": 4, "format": "e4m3"}, "bits and format must be .*, got 4 and e4m3"),
        ({"block_size": 16}, "block_size must be a power of two from 32 to 4096, got 16"),
        ({"block_size": 8192}, "block_size must be .* got 8192"),
        ({"block_size": 96}, "block_size must be .* got 96"),
        ({"block_size": -64}, "block_size must be .* got -64"),
        ({"offset": torch.zeros(2).long()}, r"offset must be a number, or .* int64 of shape \[2\]"),
        ({"offset": torch.tensor(1.0)}, "offset must be a number, or .* got float32"),
        (
            {"out": (torch.zeros(99).char(), scales)},
            r"codes must be .* int8 .* \[100\] on cpu, got .* \[99\]",
        ),
        (
            {"out": (torch.zeros(100).byte(), scales)},
            "codes must be a contiguous int8 .* got uint8",
        ),
        ({"out": (torch.zeros(200).char()[::2], scales)}, "codes must be .* not contiguous"),
        (
            {"out": (codes, torch.zeros(3))},
            r"scales must be .* float32 .* \[4\] on cpu, got .* \[3\]",
        ),
        (
            {"out": (codes, torch.zeros(4).half())},
            "scales must be a contiguous float32 .* got float16",
        ),
    ]
    assert_refused(quantize, good, rows, direct)


def test_bad_rows_are_refused():
    def good():
        codes, scales, *others, out, _ = sum_sample(128)
        found = dict(zip(("bits", "format", "block_size", "divisor"), others, strict=True))
        return {"codes": codes, "scales": scales, **found, "numel": 128, "out": out}

    def direct(arguments):
        *first, _, out = arguments.values()
        return *first, out, torch.zeros((), dtype=torch.int64)

    codes, scales = torch.zeros(3, 129).char(), torch.zeros(3, 2)
    rows = [
        ({"codes": codes}, r"codes must be int8 of shape \[3, 128\] with .* got .* \[3, 129\]"),
        ({"codes": codes[:0, 1:]}, r"codes must be int8 of shape \[1, 128\]"),
        ({"codes": codes.T.contiguous().T[:, 1:]}, "codes must be int8 .* not contiguous"),
        ({"codes": codes[:1, 1:].expand(3, -1)}, "codes must be int8 .* not contiguous"),
        ({"scales": scales[1:]}, r"scales must be float32 of shape \[3, 2\]"),
        ({"divisor": 0.0}, "divisor must not be 0, got 0"),
    ]
    assert_refused(dequantize_sum, good, rows, direct)
    rows = [
        ({"codes": codes}, "codes must be rows of whole blocks of 64 entries, 128 in all, got"),
        ({"numel": 500, "out": None}, "codes must be rows of .* 500 in all, got"),
        ({"scales": scales[:, 1:]}, r"scales must be float32 of shape \[3, 2\]"),
    ]
    assert_refused(lambda divisor, **each: dequantize(**each), good, rows)


def test_bad_arguments_of_dequantize_are_refused():
    def good():
        counter = torch.zeros((), dtype=torch.int64)
        arguments = *message(100, 8, "int", 32), 8, "int", 32, False, torch.zeros(100), counter
        return dict(zip(DECODING, arguments, strict=True)) | {"numel": 100}

    rows = [
        ({"bits": 16}, "bits and format must be .*, got 16 and int"),
        ({"format": "fp8"}, "bits and format must be .*, got 8 and fp8"),
        ({"block_size": 48}, "block_size must be .* got 48"),
        ({"codes": torch.zeros(101).char()}, r"codes must be .* \[100\] on cpu, got .* \[101\]"),
        ({"codes": torch.zeros(100)}, "codes must be a contiguous int8 .* got float32"),
        ({"scales": torch.zeros(5)}, r"scales must be .* \[4\] on cpu, got .* \[5\]"),
        ({"scales": torch.zeros(4).double()}, "scales must be a contiguous float32 .* got float64"),
        ({"out": torch.zeros(100).double()}, "out must be a contiguous 1-d .* got float64"),
        ({"corrupt": torch.zeros(1).long()}, r"corrupt must be a 0-d int64 tensor on cpu, got .*1"),
        ({"corrupt": torch.tensor(0.0)}, "corrupt must be a 0-d int64 tensor on cpu, got float32"),
    ]
    assert_refused(dequantize, good, rows, lambda arguments: tuple(arguments.values())[:-1])
    public = [
        ({"numel": -1}, "numel must be at least 0, got -1"),
        ({"accumulate": True, "out": None}, "out must be given to accumulate, got None"),
        ({"out": torch.zeros(99)}, "out must be of length numel, 100, got 99"),
        ({"scales": torch.zeros(4, device="meta")}, r"scales must be .* on cpu, got .* on meta"),
    ]
    assert_refused(dequantize, good, public)
