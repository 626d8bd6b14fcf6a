"""The contract of every compressor, in all places: one row each in ``catalog.py``."""

from functools import partial
from itertools import product

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import pyparallel.compression
from benchmarks.theory.contraction import contraction
from pyparallel.compression import (
    BufferLayout,
    Cast,
    Chain,
    ChunkTopK,
    CorruptMessageError,
    ErrorFeedback,
    Int8,
    PermK,
    PerParameter,
    RandomK,
    Switch,
    Threshold,
    TopK,
)
from pyparallel.compression.sparsifiers.base import Sparsifier
from tests.compression.catalog import CATALOG, LAYOUT

CPU = torch.device("cpu")
WITH_FEEDBACK = [row for row in CATALOG if row.feeds_back]
UNBIASED = [row for row in CATALOG if row.compressor.unbiased]
CONTRACTING = [row for row in CATALOG if contraction(row.compressor, LAYOUT) is not None]
DRAWING = [row for row in CATALOG if row.reseeded]
COMPRESSORS = [compressor for row in CATALOG for compressor in row.compressors]


def draw(seed, numel=LAYOUT.numel, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def decode(compressor, message, layout=LAYOUT):
    return compressor.decompress(message, layout, torch.full((layout.numel,), 7.0))


def encode_and_decode(compressor, x, state, residual=None):
    message = compressor.compress(x, state, residual)
    return decode(compressor, message, state.layout)


def is_same(left, right):
    return len(left) == len(right) and all(
        a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(left, right, strict=True)
    )


def test_torch_s_default_dtype_changes_nothing(subtests):
    for compressor in COMPRESSORS:
        with subtests.test(str(compressor)):
            x = draw(0)
            message = compressor.compress(x, compressor.init(LAYOUT, CPU))
            default = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            try:
                again = compressor.compress(x, compressor.init(LAYOUT, CPU))
            finally:
                torch.set_default_dtype(default)
            assert is_same(message, again)


def test_unbiased_compressors_are_unbiased(subtests):
    for row in UNBIASED:
        with subtests.test(str(row)):
            x, draws = draw(0), 400
            state = row.compressor.init(LAYOUT, CPU)
            total, squares = torch.zeros(2, len(x), dtype=torch.float64)
            largest = 0.0
            for _ in range(draws):
                error = encode_and_decode(row.compressor, x, state).double() - x
                total += error
                squares += error**2
                largest = max(largest, float(error.abs().max()))
            standard_error = (squares / draws).sqrt() / draws**0.5
            # As in Bernstein's inequality, for entries that are rarely drawn.
            rare = 15 * largest / draws
            assert largest > 0
            assert ((total / draws).abs() <= 5 * standard_error + rare + 1e-5 * x.abs()).all()


@st.composite
def buffers(draws):
    """Draw buffers of every kind: zeros, outliers, denormals, wide ranges of magnitudes."""
    layout = draws(st.sampled_from([BufferLayout.flat(1), BufferLayout.flat(40), LAYOUT]))
    x = draw(draws(st.integers(0, 99)), layout.numel)
    shape = draws(st.sampled_from(["normal", "equal", "spiky", "mixed", "sparse"]))
    if shape == "equal":
        x = x.sign()
    elif shape == "spiky":
        x[draws(st.integers(0, layout.numel - 1))] *= 1e4
    elif shape == "mixed":
        x *= 10 ** torch.linspace(-9, 9, layout.numel)
    elif shape == "sparse":
        x *= x.abs() > 2
    scale = draws(st.sampled_from([1e-44, 1e-38, 1e-30, 1e-12, 1e-4, 1.0, 1e3]))
    return layout, x * scale


def error_with_residual(compressor, x, state):
    """Return the squared error with a residual: for error feedback a compressor must contract."""
    residual = torch.zeros(len(x))
    return (encode_and_decode(compressor, x, state, residual).double() - x).square().sum()


def test_a_declared_contraction_holds(subtests):
    for row in CONTRACTING:
        with subtests.test(str(row)):
            check_contraction(row=row)


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(buffer=buffers())
def check_contraction(row, buffer):
    (layout, x), draws = buffer, 20 if row.reseeded else 1
    delta = contraction(row.compressor, layout)
    assert 0 < delta <= 1
    state = row.compressor.init(layout, CPU)
    errors = torch.stack([error_with_residual(row.compressor, x, state) for _ in range(draws)])
    spread = errors.std() / draws**0.5 if draws > 1 else 0
    truth = x.double().square().sum()
    below_float32 = layout.numel * 2.0**-149
    assert errors.mean() <= (1 - delta + 1e-5) * truth + 5 * spread + below_float32


def test_messages_and_residual_add_up(subtests):
    for row, dtype in product(WITH_FEEDBACK, [torch.float32, torch.bfloat16]):
        with subtests.test(f"{row} {dtype}"):
            state = row.compressor.init(LAYOUT, CPU)
            residual = torch.zeros(LAYOUT.numel)
            truth, sent = torch.zeros(2, LAYOUT.numel, dtype=torch.float64)
            for step in range(20):
                x = draw(step, dtype=dtype)
                sent += encode_and_decode(row.compressor, x, state, residual)
                truth += x
            assert residual.norm() > 0 or dtype != torch.float32
            assert (truth - sent - residual).norm() <= 1e-5 * truth.norm()


def test_equal_seeds_give_equal_messages(subtests):
    for row in CATALOG:
        with subtests.test(str(row)):

            def messages(compressor, rank=0, steps=2):
                state = compressor.init(LAYOUT, CPU, rank)
                return [compressor.compress(draw(0), state) for _ in range(steps)]

            first, second = messages(row.compressor)
            for message, again in zip((first, second), messages(row.compressor), strict=True):
                assert is_same(message, again)
            assert is_same(first, messages(row.compressor, rank=1)[0]) == (
                row.draws_alike or row.reseeded is None
            )
            if row.reseeded:
                assert not is_same(first, second)
                assert not is_same(first, messages(row.reseeded)[0])


def test_buffers_of_other_parameters_draw_different_numbers(subtests):
    for row in DRAWING:
        with subtests.test(str(row)):
            x = draw(0)
            first, second = (
                row.compressor.compress(
                    x, row.compressor.init(BufferLayout.flat(len(x), name), CPU)
                )
                for name in ("a", "b")
            )
            assert not is_same(first, second)


def test_empty_and_single_entries(subtests):
    for compressor, layout in product(
        COMPRESSORS, [BufferLayout(()), BufferLayout.flat(0), BufferLayout.flat(1)]
    ):
        with subtests.test(f"{compressor} {layout}"):
            state = compressor.init(layout, CPU)
            x = torch.full((layout.numel,), 0.5)
            for _ in range(3):
                decoded = encode_and_decode(compressor, x, state)
                assert decoded.isfinite().all()
            assert torch.equal(x, torch.full_like(x, 0.5))


def test_sixteen_bit_inputs(subtests):
    for compressor, dtype in product(COMPRESSORS, [torch.bfloat16, torch.float16]):
        with subtests.test(f"{compressor} {dtype}"):
            x = draw(0, dtype=dtype)
            narrow, wide = (compressor.init(LAYOUT, CPU) for _ in range(2))
            message = compressor.compress(x, narrow)
            if isinstance(compressor, Sparsifier):
                assert message[0].dtype == dtype
            expected = encode_and_decode(compressor, x.float(), wide)
            allowed = torch.finfo(dtype).eps * expected.abs().max()
            assert (decode(compressor, message) - expected).abs().max() <= allowed

            out = compressor.decompress(message, LAYOUT, torch.zeros_like(x))
            assert out.dtype == dtype
            assert (out - expected).abs().max() <= allowed
            twice = compressor.decompress(message, LAYOUT, out.clone(), accumulate=True)
            assert (twice - 2 * expected).abs().max() <= 4 * allowed


def test_a_decoded_message_can_be_added(subtests):
    for compressor in COMPRESSORS:
        with subtests.test(str(compressor)):
            message = compressor.compress(draw(0), compressor.init(LAYOUT, CPU))
            alone = decode(compressor, message)
            added = compressor.decompress(
                message, LAYOUT, torch.ones(LAYOUT.numel), accumulate=True
            )
            torch.testing.assert_close(added, 1 + alone)


def test_non_finite_entries_propagate_but_are_not_kept(subtests):
    numbers = [float("nan"), float("inf"), float("-inf")]
    rows = zip(numbers, [[0, 300, LAYOUT.numel - 1], [77], [300]], strict=True)
    for row, (bad, places) in product(CATALOG, [*rows]):
        with subtests.test(f"{row} {bad} {places}"):
            state = row.compressor.init(LAYOUT, CPU)
            residual = draw(1) if row.feeds_back else None
            x = draw(0)
            x[places] = bad
            decoded = encode_and_decode(row.compressor, x, state, residual)
            assert not decoded.isfinite().all()  # even if it is not sent
            if row.shows_all:
                assert not decoded[places].isfinite().any()
            for step in range(3):
                assert residual is None or residual.isfinite().all()
                assert (
                    encode_and_decode(row.compressor, draw(step), state, residual).isfinite().all()
                )


def test_the_largest_numbers_do_not_spoil_a_residual(subtests):
    for row in WITH_FEEDBACK:
        with subtests.test(str(row)):
            state, residual = row.compressor.init(LAYOUT, CPU), torch.zeros(LAYOUT.numel)
            for _ in range(3):
                row.compressor.compress(3e38 * draw(0).sign(), state, residual)
                assert residual.isfinite().all()


def test_error_feedback_multiplies_the_residual_by_its_decay(subtests):
    for row, decay in product(WITH_FEEDBACK, [0.0, 0.9, 1.0]):
        with subtests.test(f"{row} {decay}"):
            wrapped = ErrorFeedback(row.compressor, decay=decay)
            state, plain = wrapped.init(LAYOUT, CPU), row.compressor.init(LAYOUT, CPU)
            residual = torch.zeros(LAYOUT.numel)
            for step in range(4):
                message = wrapped.compress(draw(step), state)
                residual *= decay
                assert is_same(message, row.compressor.compress(draw(step), plain, residual))
                assert torch.equal(state.entries["residual"], residual)


def noise(tensor, seed):
    """Return random bytes of the same length."""
    size = tensor.numel() * tensor.element_size()
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (size,), dtype=torch.uint8, generator=generator).view(tensor.dtype)


WRONG_SHAPES = {
    "short": lambda t: t[:-1],
    "long": lambda t: torch.cat([t, t[:1]]),
    "empty": lambda t: t[:0],
    "no buffer": lambda t: t[None],
    "other dtype": lambda t: t.to(torch.complex64),
}
WRONG_VALUES = {
    **{f"noise {seed}": partial(noise, seed=seed) for seed in range(4)},
    **{
        f"bytes {byte:x}": lambda t, byte=byte: torch.full_like(t.view(torch.uint8), byte).view(
            t.dtype
        )
        for byte in (0x00, 0x7F, 0x80, 0xFF)
    },
}


def spoiled(message, kinds):
    """Yield (name, message) with one tensor corrupted in every way, and with all of them."""
    for name, spoil in kinds.items():
        for place, tensor in enumerate(message):
            yield f"{name} {place}", (*message[:place], spoil(tensor), *message[place + 1 :])
        yield f"{name} all", tuple(spoil(tensor) for tensor in message)


def try_to_decode(compressor, message, accumulate):
    """Return whether it was rejected; then out is unchanged, and memory outside always."""
    storage = draw(9, LAYOUT.numel + 128)
    before = storage.clone()
    out = storage[64:-64]
    try:
        compressor.decompress(message, LAYOUT, out, accumulate=accumulate)
        refused = False
    except CorruptMessageError:
        refused = True
        assert torch.equal(out, before[64:-64])
    assert torch.equal(storage[:64], before[:64])
    assert torch.equal(storage[-64:], before[-64:])
    return refused


def test_corrupt_messages_are_rejected_or_harmless(subtests):
    for row, accumulate in product(CATALOG, [False, True]):
        with subtests.test(f"{row} {accumulate}"):
            message = row.compressor.compress(draw(0), row.compressor.init(LAYOUT, CPU))
            counts = {"one less": message[:-1], "one more": (*message, message[0])}
            for other in counts.values():
                assert try_to_decode(row.compressor, other, accumulate)
            for name, other in spoiled(message, WRONG_SHAPES):
                # Fewer values, with as many indices, may be a message of a sparsifier.
                may_be_sent = name in ("short all", "empty all")
                assert try_to_decode(row.compressor, other, accumulate) or may_be_sent, name
            verdicts = [
                try_to_decode(row.compressor, other, accumulate)
                for _, other in spoiled(message, WRONG_VALUES)
            ]
            assert any(verdicts) == row.refuses
            assert not try_to_decode(row.compressor, message, accumulate)


CHAIN = Chain(TopK(0.1), Int8(block_size=32))
BY_NAME = PerParameter({"*.bias": Cast(), "*": ErrorFeedback(TopK(0.1))})
SWITCH = Switch({0: ErrorFeedback(Cast()), 2: ErrorFeedback(TopK(0.1))})
NEVER_SENT = [  # a compressor, and what makes a message of its shapes that it never sends
    (RandomK(0.3), lambda values, number: (values, -number)),
    (PermK(num_ranks=3), lambda values, numbers: (values, numbers + 4)),
    (PermK(num_ranks=3), lambda values, numbers: (values, -numbers - 1)),
    (Threshold(0.5), lambda values, indices: (values, indices.flip(0))),
    (Threshold(0.5), lambda values, indices: (values, indices + LAYOUT.numel)),
    (Threshold(0.5), lambda values, indices: (values, indices - LAYOUT.numel)),
    (ChunkTopK(16, chunk=256), lambda values, indices: (values, indices.flip(0))),
    (ChunkTopK(16, chunk=256), lambda values, indices: (values, indices | 8 << 4)),  # repeated
    (ChunkTopK(16, chunk=256), lambda values, indices: (values, indices + 1)),
    (CHAIN, lambda codes, scales, indices: (codes, scales, indices.flip(0))),
    (CHAIN, lambda codes, scales, indices: (codes, scales - torch.inf, indices)),
    (BY_NAME, lambda lengths, *rest: (lengths + 1, *rest)),
    (BY_NAME, lambda lengths, *rest: (lengths - 3, *rest)),
    (BY_NAME, lambda *message: (*message[:-1], message[-1] + 1000)),
    (SWITCH, lambda which, *rest: (which + 2, *rest)),
    (SWITCH, lambda which, *rest: (which - 1, *rest)),
]


def test_messages_that_are_never_sent_are_rejected(subtests):
    for place, (compressor, spoil) in enumerate(NEVER_SENT):
        with subtests.test(f"{place} {compressor}"):
            message = compressor.compress(draw(0), compressor.init(LAYOUT, CPU))
            assert try_to_decode(compressor, spoil(*message), accumulate=False)


def test_repr_round_trips(subtests):
    for compressor in COMPRESSORS:
        with subtests.test(str(compressor)):
            names = {**vars(pyparallel.compression), "torch": torch}
            assert eval(repr(compressor), names) == compressor


def test_a_state_resumes_bit_for_bit(subtests):
    for compressor in COMPRESSORS:
        with subtests.test(str(compressor)):
            state, other = (compressor.init(LAYOUT, CPU, rank=1) for _ in range(2))
            for step in range(3):
                compressor.compress(draw(step), state)
            other.load_state(state.parameter_state(), state.common_state())
            for step in range(3, 6):
                first, second = (compressor.compress(draw(step), each) for each in (state, other))
                assert is_same(first, second)
            assert state.common_state().keys() == other.common_state().keys()
            for name, tensors in state.parameter_state().items():
                for key, tensor in tensors.items():
                    assert torch.equal(tensor, other.parameter_state()[name][key]), (name, key)


def test_only_flat_buffers_of_floats_are_supported(subtests):
    for compressor in COMPRESSORS:
        with subtests.test(str(compressor)):
            state = compressor.init(LAYOUT, CPU)
            with pytest.raises(ValueError, match=r"bfloat16 and float16 only, got torch\.float64"):
                compressor.compress(draw(0).double(), state)
            with pytest.raises(ValueError, match=f"a contiguous buffer of {LAYOUT.numel} entries"):
                compressor.compress(draw(0)[:-1], state)
