"""``random_k`` and its indices: samples for the parity harness, and tests of these ops alone."""

from itertools import product
from math import comb

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyparallel.ops import random_k, random_k_indices
from pyparallel.ops.random_k import random_k_indices_reference, random_k_reference
from tests.ops.parity import (
    COMPILED_CPU,
    DTYPES,
    LENGTHS,
    ON_GPU,
    assert_parity,
    assert_refused,
    assert_refused_directly,
    each_compiled,
    fuzz,
    require_compiled,
)

RUN_LENGTHS = [1, 3, 32]
OFFSET = torch.tensor(2**35 + 3)


def most(numel, run_length):
    return numel // run_length * run_length


def sample_indices(numel, k, *, seed=2**63 - 5, run_length=1):
    dtype = torch.int32 if numel < 2**31 else torch.int64
    return numel, seed, OFFSET, run_length, torch.full((k,), -1, dtype=dtype)


def sample(numel, k, *, dtype=torch.float32, residual_dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(numel + k)
    x, residual = (scale * torch.randn(numel, generator=generator) for _ in range(2))
    residual = None if residual_dtype is None else residual.to(residual_dtype)
    indices = random_k_indices(numel, k, seed=numel)
    return x.to(dtype), indices, residual, torch.full((k,), float("nan"), dtype=dtype)


def parity_of_indices(implementation, arguments):
    assert_parity(implementation, "random_k_indices", random_k_indices_reference, arguments)


def parity(implementation, arguments):
    assert_parity(implementation, "random_k", random_k_reference, arguments)


@each_compiled
def test_indices_of_all_lengths(implementation):
    lengths = [*LENGTHS, 2, 256, 257, 2**31 - 1, 2**31, 2**40 - 1, 2**62]
    for numel, run_length in product(lengths, RUN_LENGTHS):
        whole = most(numel, run_length)
        counts = {0, min(1, whole), min(whole, 4000) // 3, whole - 1, whole}
        for k in counts & set(range(5000)):
            parity_of_indices(implementation, sample_indices(numel, k, run_length=run_length))


@each_compiled
def test_indices_of_all_seeds(implementation):
    for seed in (0, 1, 2**63 - 1, -(2**63), -1):
        parity_of_indices(implementation, sample_indices(1000, 100, seed=seed))


@fuzz
@given(st.integers(0, 2**45), st.integers(1, 100), st.integers(-(2**63), 2**63 - 1), st.data())
def test_compiled_cpu_draws_anything(numel, run_length, seed, data):
    k = data.draw(st.integers(0, min(most(numel, run_length), 3000)))
    parity_of_indices(COMPILED_CPU, sample_indices(numel, k, seed=seed, run_length=run_length))


@fuzz
@given(st.integers(0, 70_000), st.integers(1, 100), st.integers(0, 2**64 - 1), st.data())
def test_indices_are_distinct_ascending_and_within(numel, run_length, seed, data):
    k = data.draw(st.integers(0, most(numel, run_length)))
    indices = random_k_indices(numel, k, seed=seed, run_length=run_length)
    assert indices.shape == (k,)
    assert bool((indices.diff() > 0).all())
    assert k == 0 or 0 <= int(indices[0]) <= int(indices[-1]) < numel


def draw_many(numel, k, draws, run_length=1):
    """Return (draws, k) indices, one draw per offset."""
    draw = [
        random_k_indices(numel, k, seed=11, offset=offset, run_length=run_length)
        for offset in range(draws)
    ]
    return torch.stack(draw).long()


def assert_equally_likely(counts, draws, probability):
    """Check that no binomial count is five standard deviations from its mean."""
    deviation = (draws * probability * (1 - probability)) ** 0.5
    assert float((counts - draws * probability).abs().max()) < 5 * deviation


def test_every_position_is_equally_likely():
    draws = 1500
    for numel, k, run_length in [
        *((2, 1, 1), (3, 1, 1), (37, 5, 1), (300, 30, 1)),
        *((103, 12, 4), (103, 10, 4), (67, 33, 32)),
    ]:
        counts = draw_many(numel, k, draws, run_length).flatten().bincount(minlength=numel)
        assert_equally_likely(counts, draws, k / numel)


def test_every_set_is_equally_likely():
    draws = 3000
    for numel, k in ((5, 2), (9, 3), (20, 2), (300, 2)):
        sets = comb(numel, k)
        codes = (draw_many(numel, k, draws) * numel ** torch.arange(k)).sum(dim=1)
        counts = codes.unique(return_counts=True)[1].double()
        # Pearson's statistic, with the sets never drawn: its mean is the degrees of freedom.
        mean = draws / sets
        statistic = float((counts - mean).square().sum() / mean) + (sets - len(counts)) * mean
        freedom = sets - 1
        assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5, f"{k} of {numel}"


def test_draws_of_neighboring_offsets_and_seeds_are_independent():
    numel, k, draws = 1000, 100, 1000
    by_offset = draw_many(numel, k, draws)
    by_seed = [random_k_indices(numel, k, seed=seed) for seed in range(draws)]
    for drawn in (by_offset, torch.stack(by_seed).long()):
        chosen = torch.zeros(draws, numel).scatter_(1, drawn, 1.0)
        overlaps = (chosen[1:] * chosen[:-1]).sum(dim=1)  # hypergeometric
        share = k / numel
        deviation = (k * share * (1 - share) ** 2 * numel / (numel - 1) / (draws - 1)) ** 0.5
        assert abs(float(overlaps.mean()) - k * share) < 5 * deviation


def test_runs_are_neighbors_around_the_end():
    numel, run_length = 1000, 8
    positions = draw_many(numel, 96, 200, run_length)
    chosen = torch.zeros(200, numel, dtype=torch.int8).scatter_(1, positions, 1)
    begins = (chosen - chosen.roll(1, dims=1) == 1).sum(dim=1)
    assert int(begins.max()) <= 12
    around_the_end = chosen[:, 0] & chosen[:, -1]
    assert int(around_the_end.sum()) > 0


def test_few_indices_of_a_very_long_buffer():
    indices = random_k_indices(2**40, 10_000, seed=5)
    assert indices.dtype == torch.int64
    assert bool((indices.diff() > 0).all())
    deviation = 2**40 / (12 * 10_000) ** 0.5
    assert abs(float(indices.double().mean()) - 2**39) < 5 * deviation


def test_an_offset_in_a_tensor_is_the_same():
    arguments = {"seed": 2**64 - 1, "run_length": 4}
    expected = random_k_indices(1000, 100, **arguments, offset=17)
    assert expected.dtype == torch.int32
    assert torch.equal(expected, random_k_indices(1000, 100, **arguments, offset=torch.tensor(17)))


@each_compiled
def test_lengths(implementation):
    for numel, residual_dtype in product(implementation.lengths, (None, torch.float32)):
        for k in {0, min(1, numel), numel // 100, numel}:
            parity(implementation, sample(numel, k, residual_dtype=residual_dtype))


@each_compiled
def test_dtypes(implementation):
    for dtype, residual_dtype in product(DTYPES, (None, *DTYPES)):
        x, indices, *rest = sample(9001, 900, dtype=dtype, residual_dtype=residual_dtype)
        parity(implementation, (x, indices, *rest))
        parity(implementation, (x, indices.long(), *rest))


@each_compiled
def test_magnitudes(implementation):
    for scale in (0.0, 1e-40, 1e-25, 3e38, float("inf"), float("nan")):
        parity(implementation, sample(1000, 300, scale=scale))
        parity(implementation, sample(1000, 300, dtype=torch.bfloat16, scale=scale))


@each_compiled
def test_unaligned_buffers(implementation):
    x, _, residual, _ = sample(9001, 0)
    indices, values = random_k_indices(9000, 900, seed=1), torch.empty(901)
    parity(implementation, (x[1:], indices[3:], residual[1:], values[4:]))


@fuzz
@given(
    st.integers(0, 40_000),
    st.floats(0, 1),
    st.sampled_from(DTYPES),
    st.sampled_from([None, *DTYPES]),
)
def test_compiled_cpu_on_anything(numel, share, dtype, residual_dtype):
    arguments = sample(numel, int(share * numel), dtype=dtype, residual_dtype=residual_dtype)
    parity(COMPILED_CPU, arguments)


def test_values_lie_at_the_indices():
    x = torch.randn(5000)
    for run_length in RUN_LENGTHS:
        draw = {"seed": 3, "offset": 4, "run_length": run_length}
        indices = random_k_indices(5000, 700, **draw)
        assert torch.equal(random_k(x, 700, **draw), x[indices.long()]), f"runs of {run_length}"


def test_unsent_entries_stay_in_the_residual():
    x, _, residual, _ = sample(5000, 700, dtype=torch.bfloat16)
    before = x.float() + residual
    values = random_k(x, 700, seed=3, residual=residual)
    sent = torch.zeros(5000)
    sent[random_k_indices(5000, 700, seed=3).long()] = values.float()
    assert torch.equal(sent + residual, before)  # exact: a rounding error is a float32


def test_bad_draws_are_refused():
    rows = [
        ({"numel": -1}, r"numel must be in \[0, 2\*\*62\], got -1"),
        ({"numel": 2**63}, r"numel must be in \[0, 2\*\*62\], got 9223372036854775808"),
        ({"run_length": 0}, r"run_length must be in \[1, 2\*\*62\], got 0"),
        ({"k": -1}, r"k must be in \[0, 100\], the whole runs of 1 in 100 elements, got -1"),
        ({"k": 101}, r"k must be in \[0, 100\], the whole runs of 1 in 100 elements, got 101"),
        ({"k": 97, "run_length": 32}, r"k must be in \[0, 96\], the whole runs of 32 in 100 elem"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*64\), got -1"),
        ({"seed": 2**64}, r"seed must be in \[0, 2\*\*64\), got 18446744073709551616"),
        ({"offset": -1}, r"offset must be an integer in \[0, 2\*\*63\), got -1"),
        ({"offset": torch.tensor(1.0)}, "offset must be a number, or a 0-d int64 .* got float32"),
        ({"offset": torch.zeros(1).long()}, r"offset must be a number, .* shape \[1\]"),
    ]
    assert_refused(random_k_indices, lambda: {"numel": 100, "k": 10, "seed": 0}, rows)
    direct = [
        ((-1, 0, OFFSET, 1, torch.zeros(0).int()), "numel"),
        ((100, 0, OFFSET, 0, torch.zeros(10).int()), "run_length"),
        ((100, 0, OFFSET, 32, torch.zeros(97).int()), "indices|k must"),
        ((100, 0, torch.tensor(1.0), 1, torch.zeros(10).int()), "offset"),
        ((100, 0, OFFSET, 1, torch.zeros(10)), "indices"),
        ((2**31, 0, OFFSET, 1, torch.zeros(10).int()), "indices"),
        ((100, 0, OFFSET, 1, torch.zeros(20).int()[::2]), "indices"),
    ]
    assert_refused_directly("random_k_indices", direct)


def test_bad_tensors_are_refused():
    def direct(arguments):
        x, _, _, residual = arguments.values()
        return x, torch.arange(10), residual, x.new_empty(10)

    rows = [
        ({"x": torch.zeros(10, 10)}, r"x must be a contiguous 1-d .* \[10, 10\]"),
        ({"x": torch.zeros(100).double()}, "x must be .* float64"),
        ({"residual": torch.zeros(99)}, "residual must be .* with x's length"),
        ({"residual": torch.zeros(200)[::2]}, "residual must be .* not contiguous"),
    ]
    good = {"x": torch.zeros(100), "k": 10, "seed": 0, "residual": None}
    assert_refused(random_k, lambda: good, rows, direct)


def test_compiled_code_refuses_indices_and_values_unlike_x():
    outputs = [
        (torch.zeros(3), torch.zeros(3), "indices"),
        (torch.arange(3), torch.zeros(2), "values|indices"),
        (torch.arange(3), torch.zeros(3).half(), "values"),
    ]
    rows = [((torch.zeros(100), indices, None, values), text) for indices, values, text in outputs]
    assert_refused_directly("random_k", rows)


BAD_INDICES = [[-1, 5], [5, 5], [7, 5], [5, 100], [5, 2**31 - 1], [-(2**31), 5]]


def test_indices_outside_or_descending_change_nothing():
    require_compiled("cpu")
    for indices, has_residual in product(BAD_INDICES, (True, False)):
        x, values = torch.randn(100), torch.zeros(2)
        residual = torch.ones(100) if has_residual else None
        rule = r"indices must ascend within \[0, 100\), got -?\d+ at"
        with pytest.raises(RuntimeError, match=rule):
            torch.ops.pyparallel.random_k(x, torch.tensor(indices).int(), residual, values)
        assert not values.any(), f"{indices}"
        assert residual is None or bool((residual == 1).all()), f"{indices}"


def test_on_cuda_bad_indices_access_no_memory_outside():
    numel, guard = 4999, 4096
    bad = [*BAD_INDICES, [0, numel], [5000, 5, 4999, -7] * 2500]
    for indices, has_residual in product(bad, (True, False)):
        case = f"{indices[:4]}, residual {has_residual}"
        with torch.device(ON_GPU.device):
            x, residual = torch.randn(guard + numel + guard), torch.ones(guard + numel + guard)
            values, places = torch.zeros(guard + len(indices) + guard), torch.tensor(indices)
        inside = slice(guard, guard + numel)
        ON_GPU.find("random_k")(
            x[inside],
            places.int(),
            residual[inside] if has_residual else None,
            values[guard:-guard],
        )
        for buffer, untouched in ((residual, 1.0), (values, 0.0)):
            assert bool((buffer[:guard] == untouched).all()), case
            assert bool((buffer[-guard:] == untouched).all()), case
        if not has_residual:
            is_inside = (places >= 0) & (places < numel)
            expected = torch.where(is_inside, x[inside][places.clamp(0, numel - 1)], 0.0)
            assert torch.equal(values[guard:-guard], expected), case


def test_inf_and_nan_are_sent_and_not_kept():
    for number in (float("nan"), float("inf"), -float("inf")):
        residual = torch.zeros(3)
        values = random_k(torch.tensor([number, 1.0, 2.0]), 3, seed=1, residual=residual)
        assert not values.isfinite().all(), f"{number}"
        assert torch.equal(residual, torch.zeros(3)), f"{number}"
