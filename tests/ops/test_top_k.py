"""``top_k``, ``top_k_chunks`` and their inverses: samples for the harness, and their own tests."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyparallel.ops import scatter_add_, scatter_chunks, top_k, top_k_chunks
from pyparallel.ops.top_k import (
    scatter_add_reference,
    scatter_chunks_reference,
    sizes_of_chunks,
    top_k_chunks_reference,
    top_k_reference,
)
from tests.ops.parity import (
    COMPILED,
    COMPILED_CPU,
    DTYPES,
    LENGTHS,
    assert_corrupt_is_refused,
    assert_parity,
    assert_refused,
    assert_refused_directly,
    each_compiled,
    fuzz,
)

INF, NAN = float("inf"), float("nan")
SPECIAL = [0.0, -0.0, INF, -INF, NAN, -NAN, 1e-40, -1e-45, 3e38, 1.0, -1.0]


def heavy_tailed(numel, seed):
    """Return Student's t with three degrees of freedom, with tails like those of gradients."""
    normal = torch.randn(4, numel, generator=torch.Generator().manual_seed(seed))
    return normal[0] / (normal[1:].square().mean(0).sqrt() + 1e-6)


def with_outputs(x, k, *, residual=None, threshold=0.0, index_dtype=torch.int32):
    hint = None if threshold is None else torch.tensor(threshold, dtype=torch.float32)
    values = torch.full((k,), NAN, dtype=x.dtype)
    return x, residual, hint, values, torch.full((k,), -7, dtype=index_dtype)


def sample(numel, k, *, dtype=torch.float32, kept=torch.float32, threshold=0.0):
    x = heavy_tailed(numel, numel).to(dtype)
    residual = None if kept is None else heavy_tailed(numel, numel + 1).to(kept)
    return with_outputs(x, k, residual=residual, threshold=threshold)


def magnitudes(x, residual):
    """|acc|, with NaN above infinity, as float64."""
    acc = x.float() if residual is None else x.float() + residual.float()
    return torch.where(acc.isnan(), INF, acc.abs().double().clamp(max=1e300))


def kth_magnitude(arguments, k):
    return magnitudes(*arguments[:2]).sort(descending=True).values[k - 1].item()


def parity(implementation, arguments):
    assert_parity(implementation, "top_k", top_k_reference, arguments)


@each_compiled
def test_lengths_and_counts(implementation):
    for numel in LENGTHS:
        counts = {0, 1, numel // 50, numel - 1, numel}
        if implementation.is_slow and numel > 5000:
            counts = {numel // 50} if numel > 100_000 else {numel // 50, numel - 1}
        for k in sorted(counts & set(range(numel + 1))):
            parity(implementation, sample(numel, k))


@each_compiled
def test_dtypes_and_hints(implementation):
    hints = ["none", "unknown", "good", "too high"]
    for dtype, kept, hint in implementation.cases(DTYPES, [None, *DTYPES], hints):
        x, residual, *_ = sample(10_007, 100, dtype=dtype, kept=kept)
        good = kth_magnitude((x, residual), 103)
        threshold = {"none": None, "unknown": 0.0, "good": good, "too high": 1e30}[hint]
        parity(implementation, with_outputs(x, 100, residual=residual, threshold=threshold))


@each_compiled
def test_any_threshold_is_only_a_hint(implementation):
    # Large enough that a hint of 0 overflows the candidates.
    for threshold in (1e-45, -3.0, INF, NAN):
        parity(implementation, sample(70_000, 300, threshold=threshold))


@each_compiled
def test_ties_are_broken_by_index(implementation):
    lengths, entries = (1, 5, 1000), (*SPECIAL, 0.3)
    some = zip(itertools.cycle(lengths), entries, strict=False)
    rows = some if implementation.is_slow else itertools.product(lengths, entries)
    for numel, entry in rows:
        x = torch.full((numel,), entry)
        parity(implementation, with_outputs(x, (numel + 1) // 2))
        _, indices = top_k(x, numel // 3)
        assert indices.tolist() == list(range(numel // 3)), f"{numel} of {entry}"


@each_compiled
def test_more_ties_than_the_candidates_have_room_for(implementation):
    dtypes, entries = (None, torch.float32, torch.float16), (0.3, NAN, 0.0)
    for kept, entry in (zip if implementation.is_slow else itertools.product)(dtypes, entries):
        residual = None if kept is None else torch.zeros(70_000, dtype=kept)
        parity(implementation, with_outputs(torch.full((70_000,), entry), 40, residual=residual))


@each_compiled
def test_few_distinct_values_and_special_ones(implementation):
    for kept, k in itertools.product((None, *DTYPES), (1, 3, 50, 400, 999)):
        generator = torch.Generator().manual_seed(k)
        x, residual = (
            torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (1000,), generator=generator)]
            for _ in range(2)
        )
        kept_residual = None if kept is None else residual.to(kept)
        parity(implementation, with_outputs(x, k, residual=kept_residual))


@each_compiled
def test_the_largest_entries_may_be_adjacent(implementation):
    # All candidates in one thread's share, and a strided sample without any of them.
    x = 1e-3 * heavy_tailed(100_003, 0)
    x[60_000:60_400] = heavy_tailed(400, 1).abs() + 1
    for k in (350, 500):
        parity(implementation, with_outputs(x, k))


@each_compiled
def test_wide_indices(implementation):
    x = heavy_tailed(5000, 0)
    for threshold in (0.0, 1e30):
        arguments = with_outputs(x, 100, threshold=threshold, index_dtype=torch.int64)
        parity(implementation, arguments)


@fuzz
@given(
    numel=st.integers(0, 100_000),
    share=st.floats(0, 1) | st.floats(0, 0.01),
    dtype=st.sampled_from(DTYPES),
    kept=st.sampled_from([None, *DTYPES]),
    threshold=st.none() | st.floats(width=32),
)
def test_compiled_cpu_on_anything(numel, share, dtype, kept, threshold):
    k = int(share * numel)
    parity(COMPILED_CPU, sample(numel, k, dtype=dtype, kept=kept, threshold=threshold))


def test_unaligned_buffers():
    for offset in (1, 3, 5):
        x, residual = heavy_tailed(70_000, 0)[offset:], heavy_tailed(70_000, 1)[offset:]
        parity(COMPILED_CPU, with_outputs(x, 700, residual=residual))


def oracle(x, residual, k):
    """Sorted by magnitude, then by index."""
    keys = magnitudes(x, residual).numpy()
    return np.sort(np.lexsort((np.arange(len(keys)), -keys))[:k])


def test_equals_sorting():
    for numel, share in itertools.product((1000, 50_000, 300_000), (0.001, 0.01, 0.3)):
        x, residual = heavy_tailed(numel, 2), heavy_tailed(numel, 3)
        x[::17] = x[0]  # ties
        k = int(share * numel)
        acc = x + residual
        expected = oracle(x, residual, k)
        values, indices = top_k(x, k, residual=residual)
        assert indices.dtype == torch.int32
        assert np.array_equal(indices.numpy(), expected), f"{k} of {numel}"
        assert torch.equal(values, acc[expected]), f"{k} of {numel}"
        acc[expected] = 0
        assert torch.equal(residual, acc), f"{k} of {numel}"


def test_every_step_is_exact_while_the_distribution_drifts():
    for drift in (0.5, 0.9, 0.99, 1.0, 1.01, 1.1, 2.0):
        threshold = torch.tensor(0.0)
        for step in range(8):
            x = heavy_tailed(60_000, step) * drift**step
            _, indices = top_k(x, 600, threshold=threshold)
            expected = oracle(x, None, 600)
            case = f"drift {drift}, step {step}"
            assert np.array_equal(indices.numpy(), expected), case
            assert threshold.item() == x[expected].abs().min().item(), case


def test_inf_and_nan_are_sent_once():
    for kept in DTYPES:
        x = torch.ones(1000)
        x[[3, 500, 999]] = torch.tensor([NAN, INF, -INF])
        residual = torch.zeros(1000, dtype=kept)
        values, indices = top_k(x, 3, residual=residual)
        assert indices.tolist() == [3, 500, 999], f"{kept}"
        assert values[0].isnan(), f"{kept}"
        assert values[1:].tolist() == [INF, -INF], f"{kept}"
        assert residual[indices].tolist() == [0, 0, 0], f"{kept}"
        assert residual.isfinite().all(), f"{kept}"


@each_compiled
def test_inf_and_nan_beyond_the_kth_are_not_kept(implementation):
    for kept, threshold in itertools.product((None, *DTYPES), (0.0, 1e30)):
        x = heavy_tailed(9000, 0)
        x[::900] = torch.tensor([NAN, INF]).repeat(5)
        for k in (1, 7):
            residual = None if kept is None else torch.zeros(9000, dtype=kept)
            parity(implementation, with_outputs(x, k, residual=residual, threshold=threshold))
    residual = torch.zeros(9000)
    values, _ = top_k(x, 7, residual=residual)
    assert not values.isfinite().any()
    assert residual.isfinite().all()


def test_entries_that_overflow_the_sent_dtype_leave_no_residual():
    x, residual = torch.full((4,), 6e4).half(), torch.full((4,), 5e4)
    values, _ = top_k(x, 1, residual=residual)
    assert values.tolist() == [INF]
    assert residual.tolist() == [0.0, 110_000.0, 110_000.0, 110_000.0]


def test_k_of_zero_leaves_the_threshold_unchanged():
    threshold, residual = torch.tensor(3.0), torch.ones(10)
    values, indices = top_k(torch.ones(10), 0, residual=residual, threshold=threshold)
    assert len(values) == len(indices) == 0
    assert threshold == 3.0
    assert residual.tolist() == [2.0] * 10


def test_bad_arguments_are_refused():
    def good():
        names = ("x", "residual", "threshold")
        return {**dict(zip(names, sample(100, 3)[:3], strict=True)), "k": 3}

    def direct(arguments):
        x, residual, threshold, k = arguments.values()
        return x, residual, threshold, torch.zeros(k), torch.zeros(k, dtype=torch.int32)

    rows = [
        ({"x": torch.zeros(10, 10)}, r"x must be a contiguous 1-d .* shape \[10, 10\]"),
        ({"x": torch.zeros(100).long()}, "x must be .* got int64 of shape"),
        ({"residual": torch.zeros(99)}, r"residual must be .* x's length .* \[99\]"),
        ({"residual": torch.zeros(200)[::2]}, "residual must be .* not contiguous"),
        ({"threshold": torch.zeros(1)}, r"threshold must be a 0-d float32 .* shape \[1\]"),
        ({"threshold": torch.tensor(1.0).double()}, "threshold must be a 0-d float32 .* float64"),
    ]
    assert_refused(top_k, good, rows, direct)
    counts = [({"k": k}, rf"^k must be in \[0, 100\], got {k}") for k in (-1, 101)]
    assert_refused(top_k, good, counts)


def test_compiled_code_refuses_outputs_of_wrong_size():
    x, indices = torch.zeros(100), torch.zeros(3).int()
    outputs = [
        (torch.zeros(101), torch.zeros(101).int(), "values|k must"),
        (torch.zeros(3).half(), indices, "values"),
        (torch.zeros(3), indices[:2], "indices"),
        (torch.zeros(3), torch.zeros(3), "indices"),
        (torch.zeros(6)[::2], indices, "values"),
    ]
    rows = [((x, None, None, *buffers), text) for *buffers, text in outputs]
    assert_refused_directly("top_k", rows)


def message(numel, k, *, dtype=torch.float32, sent=torch.float32, index_dtype=torch.int32):
    generator = torch.Generator().manual_seed(numel + k)
    dense = heavy_tailed(numel, numel).to(dtype)
    indices = torch.randperm(numel, generator=generator)[:k].sort().values.to(index_dtype)
    return dense, heavy_tailed(k, k).to(sent), indices, torch.tensor(0)


def scatter_parity(implementation, arguments):
    assert_parity(implementation, "scatter_add_", scatter_add_reference, arguments)


@each_compiled
def test_scatter_add_lengths(implementation):
    for numel, share in itertools.product(implementation.lengths, (0.0, 0.02, 1.0)):
        scatter_parity(implementation, message(numel, int(share * numel)))


@each_compiled
def test_scatter_add_dtypes(implementation):
    rows = implementation.cases(DTYPES, DTYPES, [torch.int32, torch.int64])
    for dtype, sent, index_dtype in rows:
        options = {"dtype": dtype, "sent": sent, "index_dtype": index_dtype}
        scatter_parity(implementation, message(2003, 301, **options))


@each_compiled
def test_scatter_add_of_special_values(implementation):
    for dtype in DTYPES:
        dense = torch.tensor(SPECIAL).repeat_interleave(len(SPECIAL)).to(dtype)
        values = torch.tensor(SPECIAL).repeat(len(SPECIAL)).to(dtype)
        scatter_parity(implementation, (dense, values, torch.arange(len(dense)), torch.tensor(0)))


@fuzz
@given(st.integers(0, 70_000), st.floats(0, 1), st.sampled_from(DTYPES), st.sampled_from(DTYPES))
def test_scatter_add_on_anything(numel, share, dtype, sent):
    arguments = message(numel, int(share * numel), dtype=dtype, sent=sent)
    scatter_parity(COMPILED_CPU, arguments)


def test_scatter_add_inverts_top_k():
    for dtype in DTYPES:
        x = heavy_tailed(70_000, 0).to(dtype)
        dense = torch.zeros(70_000)
        assert scatter_add_(dense, *top_k(x, 700)) is dense
        residual = torch.zeros(70_000)
        top_k(x, 700, residual=residual)
        assert torch.equal(dense + residual, x.float()), f"{dtype}"


NUMEL, SPAN = 1000, "strictly ascending and in .0, 1000.,"
CORRUPT = [
    # indices, the error for the first corrupt one, number of skipped entries
    ([-1, 3], "got -1 at position 0", 1),
    ([3, 1000], "got 1000 after 3 at position 1", 1),
    ([2, 5, 5, 7], "got 5 after 5 at position 2", 1),
    ([2, 9, 4, 5], "got 4 after 9 at position 2", 1),
    ([2**31 - 1], "got 2147483647 at position 0", 1),
    ([-(2**31)], "got -2147483648 at position 0", 1),
    ([0, -(2**31), 1], "got -2147483648 after 0 at position 1", 1),
    ([999, 998, 997], "got 998 after 999 at position 1", 2),
]


def test_corrupt_indices_are_refused_before_anything_is_written():
    for (indices, got, _), dtype in itertools.product(CORRUPT, (torch.int32, torch.int64)):
        places = torch.tensor(indices, dtype=dtype)
        arguments = torch.zeros(NUMEL), torch.ones(len(places)), places, torch.tensor(0)
        text = f"indices must be {SPAN} {got}$"
        assert_corrupt_is_refused("scatter_add_", scatter_add_reference, arguments, text)


def test_one_corrupt_index_among_many_is_found():
    # In each thread's share, and at the boundary of two.
    for position in (0, 1, 32_767, 32_768, 50_000, 99_999):
        indices = torch.arange(100_000)
        indices[position] = -5
        with pytest.raises(RuntimeError, match=rf"got -5 .*at position {position}$"):
            scatter_add_(torch.zeros(100_000), torch.ones(100_000), indices)


@pytest.mark.parametrize("implementation", COMPILED[1:], ids=str)
def test_devices_skip_and_count_corrupt_indices(implementation):
    for (indices, _, skipped), dtype in itertools.product(CORRUPT, DTYPES):
        case = f"{indices} {dtype}"
        places = torch.tensor(indices, device=implementation.device)
        memory = torch.zeros(3 * NUMEL, dtype=dtype, device=implementation.device)
        dense = memory[NUMEL : 2 * NUMEL]
        corrupt = torch.tensor(100, device=implementation.device)
        values = torch.ones_like(places).to(dtype)
        implementation.find("scatter_add_")(dense, values, places, corrupt)
        assert corrupt == 100 + skipped, case
        assert dense.sum() == len(indices) - skipped, case
        assert dense.max() <= 1, case
        assert not memory[:NUMEL].any(), case
        assert not memory[2 * NUMEL :].any(), case


@pytest.mark.parametrize("implementation", COMPILED[1:], ids=str)
def test_devices_lose_no_additions_at_duplicate_indices(implementation):
    # The fourth index is above the third: it is valid, and so is the first.
    places = torch.tensor([5, 9, 3, 5], device=implementation.device)
    for dtype in DTYPES:
        dense, corrupt = (torch.zeros(n, device=implementation.device) for n in (10, 1))
        dense, corrupt, values = dense.to(dtype), corrupt[0].long(), torch.ones_like(places)
        implementation.find("scatter_add_")(dense, values.to(dtype), places, corrupt)
        assert corrupt == 1, f"{dtype}"
        assert dense.tolist() == [0, 0, 0, 0, 0, 2, 0, 0, 0, 1], f"{dtype}"


def test_scatter_add_refuses_bad_tensors():
    names = ("dense", "values", "indices", "corrupt")
    rows = [
        ({"dense": torch.zeros(10, 10)}, r"dense must be a contiguous 1-d .* shape \[10, 10\]"),
        ({"values": torch.zeros(7).double()}, "values must be .* got float64"),
        ({"indices": torch.arange(6)}, r"indices must be .* values's length .* \[6\]"),
        ({"indices": torch.arange(7.0)}, "indices must be .* int32 or int64 .* got float32"),
        ({"indices": torch.arange(14)[::2]}, "indices must be .* not contiguous"),
        ({"corrupt": torch.tensor(0.0)}, "corrupt must be a 0-d int64 tensor on cpu, got float32"),
        ({"corrupt": torch.zeros(1).long()}, r"corrupt must be a 0-d int64 .* shape \[1\]"),
    ]
    assert_refused(
        scatter_add_, lambda: dict(zip(names, message(100, 7), strict=True)), rows, dict.values
    )


def sample_chunks(numel, *, k=64, chunk=4096, dtype=torch.float32, kept=torch.float32):
    x = heavy_tailed(numel, numel).to(dtype)
    residual = None if kept is None else heavy_tailed(numel, numel + 1).to(kept)
    num_values, num_bytes = sizes_of_chunks(numel, k, chunk)
    values = torch.full((num_values,), NAN, dtype=dtype)
    return x, k, chunk, residual, values, torch.full((num_bytes,), 0xA5, dtype=torch.uint8)


def message_of_chunks(
    numel, *, k=64, chunk=4096, accumulate=False, dtypes=(torch.float32,) * 2, messages=None
):
    x, *_ = sample_chunks(numel)
    values, indices = top_k_chunks(x.to(dtypes[0]), k, chunk=chunk)
    if messages is not None:
        each = [top_k_chunks(x.roll(i).to(dtypes[0]), k, chunk=chunk) for i in range(messages)]
        values, indices = (torch.stack(parts) for parts in zip(*each, strict=True))
    out = heavy_tailed(numel, 3).to(dtypes[1])
    return values, indices, k, chunk, accumulate, out, torch.tensor(0)


def chunk_parity(implementation, numel, *, special=None, **options):
    x, *rest = sample_chunks(numel, **options)
    if special is not None:
        special(x)
    op = "top_k_chunks"
    assert_parity(implementation, op, top_k_chunks_reference, (x, *rest))


def chunk_parity_of_inverse(implementation, numel, **options):
    arguments = message_of_chunks(numel, **options)
    assert_parity(implementation, "scatter_chunks", scatter_chunks_reference, arguments)


CHUNKS = [(64, 4096), (4096, 4096), (1, 32), (32, 32), (7, 256), (63, 512)]


@each_compiled
def test_chunks_of_all_lengths(implementation):
    for numel in implementation.lengths[: 7 if implementation.is_slow else None]:
        chunk_parity(implementation, numel)
        chunk_parity_of_inverse(implementation, numel, accumulate=numel % 2 == 0)
    for (k, chunk), numel in itertools.product(CHUNKS, (1, 700, 1030)):
        chunk_parity(implementation, numel, k=k, chunk=chunk, kept=None)
        for accumulate in (False, True):
            chunk_parity_of_inverse(implementation, numel, k=k, chunk=chunk, accumulate=accumulate)


@each_compiled
def test_chunks_of_dtypes(implementation):
    for dtype, kept, accumulate in implementation.cases(DTYPES, [None, *DTYPES], [False, True]):
        chunk_parity(implementation, 5003, dtype=dtype, kept=kept)
        dtypes = dtype, kept or torch.float32
        chunk_parity_of_inverse(implementation, 5003, accumulate=accumulate, dtypes=dtypes)


@each_compiled
def test_sums_of_messages_in_chunks(implementation):
    """Several messages equal one call after the other, to the bit, and are refused as one."""
    for numel, messages, accumulate in ((1, 1, True), (5003, 3, False), (5003, 2, True)):
        options = {"messages": messages, "accumulate": accumulate}
        for dtypes in implementation.cases(DTYPES, DTYPES):
            chunk_parity_of_inverse(implementation, numel, **options, dtypes=dtypes)
        chunk_parity_of_inverse(implementation, numel, **options, k=7, chunk=32)


@pytest.mark.parametrize("numel", [5003, 2**21 + 5])
def test_sum_of_messages_in_chunks_equals_calls(numel):
    for dtype in DTYPES:
        values, indices, *_ = message_of_chunks(numel, messages=3)
        out = torch.zeros(numel, dtype=dtype)
        for each in zip(values, indices, strict=True):
            scatter_chunks(*each, numel=numel, out=out, accumulate=True)
        assert torch.equal(scatter_chunks(values, indices, numel=numel, out=out.clone()), out)


def put_ties(x):
    x.copy_(x.sign())


def put_few_values(x):
    x.copy_((x * 2).round())


def put_special(x):
    places = torch.arange(0, len(x), 37)
    x[places] = torch.tensor(SPECIAL).repeat(len(places))[: len(places)].to(x.dtype)


def put_nan(x):
    x[:4000] = NAN
    x[:4000:3] = INF


@each_compiled
@pytest.mark.parametrize(
    "special", [torch.Tensor.zero_, put_ties, put_few_values, put_special, put_nan]
)
def test_chunks_of_ties_and_special_values(implementation, special):
    for k, kept in ((64, None), (700, torch.float32)):
        chunk_parity(implementation, 5003, k=k, kept=kept, special=special)


@fuzz
@given(
    st.integers(0, 20_000),
    st.sampled_from(CHUNKS),
    st.sampled_from(DTYPES),
    st.sampled_from([None, *DTYPES]),
)
def test_chunks_on_anything(numel, sizes, dtype, kept):
    k, chunk = sizes
    chunk_parity(COMPILED_CPU, numel, k=k, chunk=chunk, dtype=dtype, kept=kept)
    chunk_parity_of_inverse(COMPILED_CPU, numel, k=k, chunk=chunk, dtypes=(dtype, kept or dtype))


def test_chunks_equal_sorting_in_float64():
    """SparseLoCo: of every chunk the k largest magnitudes of gradient and error, 12 bits each."""
    numel, k, chunk = 10_000, 64, 4096
    x, residual = heavy_tailed(numel, 1), heavy_tailed(numel, 2)
    acc = (x + residual).double().numpy()
    values, indices = top_k_chunks(x, k, chunk=chunk, residual=residual)
    bits = np.unpackbits(indices.numpy(), bitorder="little").reshape(-1, 12)
    places = (bits * 2 ** np.arange(12)).sum(axis=1).reshape(-1, k)
    expected = acc.copy()
    for c, row in enumerate(places):
        part = np.abs(acc[c * chunk : (c + 1) * chunk])
        assert row.tolist() == sorted(np.argsort(-part, kind="stable")[:k].tolist())
        assert np.array_equal(values[c * k : (c + 1) * k].numpy(), acc[c * chunk + row])
        expected[c * chunk + row] = 0.0
    assert np.array_equal(residual.numpy(), expected)
    sent = scatter_chunks(values, indices, k, chunk=chunk, numel=numel)
    assert np.array_equal((sent + residual).numpy(), acc)


CORRUPT_CHUNKS = [
    (0, 4095, 1),  # then the next does not ascend
    (1, 0, 1),
    (64 + 2, 904, 2),  # behind the end of the last chunk, of 904 entries; the next is below it
    (64 + 63, 4095, 1),
]


def spoil_index(indices, i, index):
    words = indices.view(-1, 3).int() @ torch.tensor([1, 256, 65536], dtype=torch.int32)
    shift = 12 * (i % 2)
    words[i // 2] = words[i // 2] & ~(0xFFF << shift) | index << shift
    indices.copy_(torch.stack([words >> place for place in (0, 8, 16)], 1).flatten() & 0xFF)


def test_corrupt_chunks_are_refused_before_anything_is_written():
    cases = itertools.product(CORRUPT_CHUNKS, (False, True), (None, 2))
    for (i, index, _), accumulate, messages in cases:
        arguments = message_of_chunks(5000, accumulate=accumulate, messages=messages)
        spoil_index(arguments[1] if messages is None else arguments[1][-1], i, index)
        text = "indices must ascend strictly within each"
        assert_corrupt_is_refused("scatter_chunks", scatter_chunks_reference, arguments, text)


@pytest.mark.parametrize("implementation", COMPILED[1:], ids=str)
def test_devices_skip_and_count_corrupt_indices_of_chunks(implementation):
    for (i, index, skipped), accumulate in itertools.product(CORRUPT_CHUNKS, (False, True)):
        values, indices, *rest, out, corrupt = message_of_chunks(5000, accumulate=accumulate)
        spoil_index(indices, i, index)
        values.fill_(1.0)
        memory = torch.zeros(3 * 5000)
        moved = [each.to(implementation.device) for each in (values, indices, memory, corrupt)]
        out = moved[2][5000:10_000]
        implementation.find("scatter_chunks")(*moved[:2], *rest, out, moved[3])
        assert int(moved[3]) == skipped, f"{i} {index}"
        assert out.sum() == 128 - skipped, f"{i} {index}"
        assert moved[2].sum() == out.sum(), f"{i} {index}"


def test_bad_chunks_are_refused():
    def good():
        return {"x": torch.zeros(100), "k": 3, "chunk": 32, "residual": torch.zeros(100)}

    rows = [
        ({"x": torch.zeros(10, 10)}, r"x must be a contiguous 1-d .* \[10, 10\]"),
        ({"residual": torch.zeros(99)}, "residual must be .* with x's length"),
        ({"chunk": 8192}, "chunk must be a power of two from 32 to 4096, got 8192"),
        ({"k": 0}, r"k must be in \[1, 32\], got 0"),
        ({"k": 33}, r"k must be in \[1, 32\], got 33"),
    ]
    outputs = sample_chunks(100, k=3, chunk=32)[4:]
    assert_refused(top_k_chunks, good, rows, lambda arguments: (*arguments.values(), *outputs))
    names = ("values", "indices", "k", "chunk", "accumulate", "out", "corrupt")

    def good_message():
        return dict(zip(names, message_of_chunks(5000), strict=True)) | {"numel": 5000}

    rows = [
        ({"values": torch.zeros(127)}, r"values must be a contiguous float32 .* \[128\].* \[127\]"),
        ({"values": torch.zeros(128).double()}, "values must be .* got float64"),
        ({"values": torch.zeros(2, 128)}, r"indices must be .* \[2, 192\].* \[192\]"),
        ({"indices": torch.zeros(192)}, "indices must be a contiguous uint8 .* got float32"),
        ({"indices": torch.zeros(191, dtype=torch.uint8)}, r"indices must be .* \[192\].* \[191\]"),
        ({"k": 4097}, r"k must be in \[1, 4096\], got 4097"),
        ({"corrupt": torch.tensor(0.0)}, "corrupt must be a 0-d int64 tensor on cpu, got float32"),
    ]
    assert_refused(scatter_chunks, good_message, rows, lambda a: tuple(a.values())[:-1])
