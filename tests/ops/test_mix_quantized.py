"""``mix_quantized_``: samples for the parity harness, and tests of this op alone."""

import copy
from itertools import cycle, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyparallel.ops import mix_, mix_quantized_, quantize
from pyparallel.ops._formats import decode_message, find_format
from pyparallel.ops.mix_quantized import mix_quantized_reference
from tests.ops.parity import (
    COMPILED,
    COMPILED_CPU,
    DTYPES,
    assert_corrupt_is_refused,
    assert_parity,
    assert_refused,
    each_compiled,
    fuzz,
    moved,
)

FORMATS = [(8, "int"), (4, "int"), (8, "e4m3"), (8, "e5m2")]
NAMES = ("z", "weight", "codes", "scales", "masses", "bits", "format", "block_size",
         "replicas", "corrupt")  # fmt: skip


def sample(
    numel, num_messages, kind=FORMATS[0], *, block_size=256, dtype=torch.float32, replicas=False
):
    generator = torch.Generator().manual_seed(numel + num_messages)
    z, *messages = (torch.randn(numel, generator=generator) for _ in range(1 + num_messages))
    named = {"bits": kind[0], "format": kind[1], "block_size": block_size}
    quantized = [quantize(message, **named) for message in messages]
    codes, scales = [code for code, _ in quantized], [scale for _, scale in quantized]
    masses = torch.rand(num_messages, generator=generator, dtype=torch.float64)
    counter = torch.zeros((), dtype=torch.int64)
    weight = torch.tensor(0.5, dtype=torch.float64)
    copies = [
        torch.randn(numel, generator=generator).to(dtype) for _ in range(num_messages * replicas)
    ]
    return z.to(dtype), weight, codes, scales, masses, *kind, block_size, copies, counter


def parity(implementation, arguments, **tolerance):
    assert_parity(implementation, "mix_quantized_", mix_quantized_reference, arguments, **tolerance)


@each_compiled
def test_lengths_and_counts(implementation):
    lengths, counts = implementation.lengths, (0, 1, 2, 3)
    some = zip(lengths, cycle((2, 1, 3, 0)))
    for numel, num_messages in some if implementation.is_slow else product(lengths, counts):
        for replicas in (False, True):
            parity(implementation, sample(numel, num_messages, replicas=replicas))


@each_compiled
def test_dtypes_formats_and_blocks(implementation):
    rows = implementation.cases(DTYPES, FORMATS, [32, 4096], [1, 2, 5], [False, True])
    for dtype, kind, block_size, num_messages, replicas in rows:
        options = {"block_size": block_size, "dtype": dtype, "replicas": replicas}
        parity(implementation, sample(5003, num_messages, kind, **options))


@each_compiled
def test_blocks_with_inf_or_nan_decode_to_nan(implementation):
    arguments = sample(600, 2)
    arguments[3][1][1] = float("nan")
    parity(implementation, arguments)
    mix_quantized_reference(*arguments)
    assert arguments[0][256:512].isnan().all()
    assert arguments[0][:256].isfinite().all()


@each_compiled
def test_messages_of_mass_zero_change_nothing(implementation):
    rows = implementation.cases([FORMATS[0], FORMATS[2]], DTYPES, [1, 2, 3], [False, True])
    for kind, dtype, num_messages, replicas in rows:
        arguments = sample(600, num_messages, kind, dtype=dtype, replicas=replicas)
        z, weight, codes, scales, masses, *_ = arguments
        masses[0], scales[0][1] = 0, float("nan")
        z[:2] = torch.tensor([-0.0, float("inf")])
        parity(implementation, arguments)
        expected = z.clone()
        mix_quantized_reference(
            expected, weight.clone(), codes[1:], scales[1:], masses[1:], *arguments[5:8],
            copy.deepcopy(arguments[8][1:]), arguments[9],
        )  # fmt: skip
        mix_quantized_reference(*arguments)
        assert torch.equal(z.view(torch.uint8), expected.view(torch.uint8)), f"{dtype}, {replicas}"
        assert not replicas or arguments[8][0].isnan().any()


@each_compiled
def test_many_messages_go_in_groups(implementation):
    # More than one launch on GPUs: grouping changes the last bits.
    for replicas in (False, True):
        arguments = sample(1025, implementation.num_messages, replicas=replicas)
        parity(implementation, arguments, rtol=1e-5, atol=1e-5)


@fuzz
@given(
    st.integers(0, 70_000),
    st.integers(0, 4),
    st.sampled_from(FORMATS),
    st.sampled_from([32, 64, 256, 2048, 4096]),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_compiled_cpu_on_anything(numel, num_messages, kind, block_size, dtype, replicas):
    options = {"block_size": block_size, "dtype": dtype, "replicas": replicas}
    parity(COMPILED_CPU, sample(numel, num_messages, kind, **options))


def corrupt_samples(kind, replicas=False):
    for place in (0, 700, -1):
        arguments = sample(1001, 2, kind, block_size=32, replicas=replicas)
        never = {(8, "int"): 0x80, (4, "int"): 0x08, (8, "e4m3"): 0xFF, (8, "e5m2"): 0x7D}[kind]
        arguments[2][1].view(torch.uint8)[min(place, 400) if kind[0] == 4 else place] = never
        yield arguments
    for value in (-1.0, float("inf")):
        arguments = sample(1001, 2, kind, block_size=32, replicas=replicas)
        arguments[3][0][31] = value
        yield arguments


@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_the_cpu_changes_nothing_for_a_corrupt_message(kind):
    for arguments in (*corrupt_samples(kind), *corrupt_samples(kind, replicas=True)):
        text = "codes and scales must be what quantize emits"
        assert_corrupt_is_refused("mix_quantized_", mix_quantized_reference, arguments, text)
        *buffers, bits, format, block_size, replicas, _ = arguments
        named = {"bits": bits, "format": format, "block_size": block_size}
        with pytest.raises(RuntimeError, match=text):
            mix_quantized_(*buffers, **named, replicas=replicas)


@pytest.mark.parametrize("implementation", COMPILED[1:], ids=str)
@pytest.mark.parametrize("replicas", [False, True])
def test_on_gpus_a_corrupt_entry_counts_as_equal_to_z_or_leaves_its_replica(
    implementation, replicas
):
    samples = [each for kind in FORMATS for each in corrupt_samples(kind, replicas=replicas)]
    for arguments in samples[:: 3 if implementation.is_slow and replicas else 1]:
        z, weight, codes, scales, masses, bits, format, block_size, copies, _ = arguments
        mixed, found = [], 0
        for code, scale, old in zip(codes, scales, copies or [z, z], strict=True):
            kind = find_format(bits, format)
            values, is_corrupt = decode_message(code, scale, kind, block_size, 1001)
            mixed.append(torch.where(is_corrupt, old, old + values if replicas else values))
            found += int(is_corrupt.sum())
        expected, total = z.clone(), weight.clone()
        mix_(expected, total, mixed, masses)
        own = moved(arguments, implementation.device)
        implementation.find("mix_quantized_")(*own)
        assert int(own[-1]) == found > 0
        wanted = expected, total, *(mixed if replicas else [])
        assert all(
            torch.equal(a.cpu(), b) for a, b in zip((*own[:2], *own[-2]), wanted, strict=True)
        )


CODES, SCALES = torch.zeros(100, dtype=torch.int8), torch.zeros(1)


def test_bad_arguments_are_refused():
    rows = [
        ({"z": torch.zeros(10, 10)}, r"z must be a contiguous 1-d .* shape \[10, 10\]"),
        ({"weight": torch.tensor(1.0)}, "weight must be a 0-d float64 tensor on z's device"),
        ({"masses": torch.ones(1).double()}, r"masses must be .* shape \[2\] .* shape \[1\]"),
        ({"scales": [SCALES]}, "scales must be as many as codes, 2, got 1"),
        ({"codes": [CODES, CODES[:99]]}, r"codes\[1\] must be .* \[100\] on cpu, got .* \[99\]"),
        ({"codes": [CODES.byte()] * 2}, r"codes\[0\] must be a contiguous int8 .* got uint8"),
        ({"scales": [torch.zeros(2)] * 2}, r"scales\[0\] must be .* \[1\] on cpu, got .* \[2\]"),
        ({"bits": 5}, "bits and format must be .*, got 5 and int"),
        ({"format": "natural"}, "bits and format must be .*, or 8 and e5m2, got 8 and natural"),
        ({"block_size": 31}, "block_size must be a power of two from 32 to 4096, got 31"),
        ({"replicas": [torch.ones(100)]}, "replicas must be none, or as many as codes, 2, got 1"),
        ({"replicas": [torch.ones(99)] * 2}, r"replicas\[0\] must be .* z's length .* \[99\]"),
        (
            {"replicas": [torch.ones(100).half()] * 2},
            r"replicas\[0\] must be of z's dtype .* float16",
        ),
        (
            {"replicas": [CODES.float()] * 2},
            r"replicas\[1\] must not overlap replicas\[0\], got 400",
        ),
        ({"corrupt": torch.zeros(2).long()}, "corrupt must be a 0-d int64 tensor on cpu, got .*2"),
    ]
    assert_refused(
        mix_quantized_, lambda: dict(zip(NAMES, sample(100, 2), strict=True)), rows, dict.values
    )


def test_impossible_masses_are_refused():
    def good():
        return dict(zip(NAMES, sample(10, 1), strict=True)) | {"weight": torch.zeros(()).double()}

    error_text = "weight and masses must be at least 0 with a positive"
    masses = [torch.tensor([mass]).double() for mass in (0.0, -0.5, float("nan"), float("inf"))]
    assert_refused(mix_quantized_, good, [({"masses": mass}, error_text) for mass in masses])
