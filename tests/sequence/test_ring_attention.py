"""Ring attention equals one device's attention, with its gradients; its bytes and its errors."""

import math
import os
import re
import signal
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyparallel import compression
from pyparallel.comm import CommStats, PeerError, check_consistent_across_ranks
from pyparallel.compression import BufferLayout, ErrorFeedback, Int8, TopK
from pyparallel.sequence import attention, ring, ring_attention, zigzag_split
from pyparallel.sequence.ring import Ring
from tests.gossip.loops import error_of
from tests.workers import observe_ranks, on_ranks

BATCH, HEADS, DIM = 2, 3, 5
CAUSAL = [False, True, "zigzag"]
LENGTHS = [[4, 4, 4, 4], [2, 6, 0, 4], [0, 2, 8, 2]]  # of each rank; the first ones of fewer ranks
ATOL = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def draw(*lengths, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(BATCH, HEADS, length, DIM) for length in lengths]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def attend_plainly(q, k, v, *, causal=False, scale=None):
    """Return attention as it is written, in float64: softmax(scale q k') v."""
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        later = torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None]
        scores = scores.masked_fill(later, -math.inf)
    return scores.softmax(-1) @ v


def places_of(lengths, causal):
    """Return the places in the whole sequence that each rank has, if they have so many."""
    if causal != "zigzag":
        return torch.arange(sum(lengths)).split(lengths)
    halves = [length // 2 for length in lengths]
    chunks = torch.arange(sum(lengths)).split([*halves, *reversed(halves)])
    return [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(len(lengths))]


def with_gradients(attend, q, k, v, of_out):
    """Return attention, and the gradients of the three."""
    leaves = [each.detach().clone().requires_grad_() for each in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, of_out.to(out.dtype))]


def decode(compressor, k, v):
    """Return k and v as the message of their owner decodes."""
    flat = torch.stack([k, v]).view(-1)
    layout = BufferLayout.flat(flat.numel())
    message = compressor.compress(flat, compressor.init(layout, flat.device))
    return compressor.decompress(message, layout, torch.empty_like(flat)).view(2, *k.shape)


def compare(rank, causal, lengths, dtype, compressor=None, scale=None, uses_flash=True):
    """Return the largest difference to one device, of attention and gradients of this rank.

    Without a flash kernel three queries are computed at a time.
    """
    lengths = lengths[: dist.get_world_size()]
    places = places_of(lengths, causal)
    whole = draw(*[sum(lengths)] * 4, dtype=dtype)
    parts = [each[:, :, places[rank]] for each in whole]
    options = {"causal": causal, "compressor": compressor, "scale": scale}
    with (
        mock.patch.object(attention, "can_use_flash", return_value=uses_flash),
        mock.patch.object(ring, "MOST_ROWS", 3),
    ):
        ours = with_gradients(partial(ring_attention, **options), *parts)
    q, k, v, of_out = (each.double() for each in whole)
    for each in places if compressor else []:
        if each.numel():
            decoded = decode(compressor, *(x[:, :, each] for x in whole[1:3])).double()
            k[:, :, each], v[:, :, each] = decoded
    plain = partial(attend_plainly, causal=causal, scale=scale)
    theirs = with_gradients(plain, q, k, v, of_out)
    assert {each.dtype for each in ours} == {dtype}
    differences = [a - b[:, :, places[rank]] for a, b in zip(ours, theirs, strict=True)]
    return max([each.abs().max().item() for each in differences if each.numel()], default=0.0)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_equals_attention_of_one_device(ranks, num_ranks):
    rows = [(causal, lengths, dtype) for causal in CAUSAL for lengths in LENGTHS for dtype in ATOL]
    rows.append((True, LENGTHS[1], torch.float64, None, 0.3))
    plain = None, None, False
    rows += [(each, lengths, torch.float64, *plain) for each in CAUSAL for lengths in LENGTHS]
    rows += [("zigzag", LENGTHS[2], dtype, *plain) for dtype in ATOL]
    for row, found in zip(rows, ranks.run_each(num_ranks, compare, rows), strict=True):
        assert max(found) <= ATOL[row[2]], (row, found)


class Sizes(TorchDispatchMode):
    """Records the numbers of elements of what ops return."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.largest = max([self.largest, *(each.numel() for each in tensors)])
        return result


@pytest.mark.parametrize("uses_flash", [True, False])
def test_memory_grows_with_the_length_and_not_with_its_square(monkeypatch, uses_flash):
    monkeypatch.setattr(attention, "can_use_flash", lambda q: uses_flash)
    for dtype, length in product((torch.bfloat16, torch.float32), (512, 1024)):
        leaves = [torch.randn(1, 2, length, 8).to(dtype).requires_grad_() for _ in range(3)]
        with Sizes() as sizes:
            ring_attention(*leaves, causal=True).square().sum().backward()
        assert sizes.largest <= 2 * length * ring.MOST_ROWS  # scores of two heads


def test_calls_of_the_flash_kernels_of_a_gpu_fit_their_schemas():
    with FakeTensorMode():  # of a GPU that is not there
        make = partial(torch.empty, dtype=torch.bfloat16, device="cuda")
        q, *kv = (make(2, 3, length, 16) for length in (6, 4, 4))
        out, lse = attention.attend(q, *kv, 0.3, False, True)
        grads = attention.attend_backward(q, *kv, (out, out, lse), 0.3, False, True)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 3, 6, 1), torch.float32)
    assert [each.shape for each in grads] == [each.shape for each in (q, *kv)]


def test_compressed_equals_attention_to_what_was_decoded(ranks):
    names = ["Cast", "Fp4", "Fp8", "Int4", "Int8", "Sign", "Statistical"]
    compressors = [getattr(compression, name)() for name in names] + [Int8(block_size=32)]
    rows = [(each, LENGTHS[1], torch.float32, Int8()) for each in CAUSAL]
    rows += [("zigzag", LENGTHS[1], torch.float32, each) for each in compressors]
    for row, found in zip(rows, ranks.run_each(3, compare, rows), strict=True):
        assert max(found) <= 1e-5, (row, found)


def count_bytes(rank, causal, lengths, dtype, compressor):
    """Return the bytes that this rank sends in a forward and in its backward."""
    stats = CommStats()
    q, k, v = draw(*[lengths[rank]] * 3, dtype=dtype)
    out = ring_attention(
        q.requires_grad_(), k, v, causal=causal, compressor=compressor, stats=stats
    )
    forward = stats.wire_bytes
    out.sum().backward()
    return forward, stats.wire_bytes - forward


def padded(num_bytes):
    return -(-num_bytes // 32) * 32


# Of three ranks: the parts of k and v that each sends, and those of which it sends gradients.
AROUND = [(0, 2), (1, 0), (2, 1)], [(2, 1), (0, 2), (1, 0)]
TO_LATER_RANKS = [(0,), (1, 0), ()], [(), (0,), (1, 0)]  # the last one's go home
SENT = {False: AROUND, "zigzag": AROUND, True: TO_LATER_RANKS}


@pytest.mark.parametrize(
    ("dtype", "compressor", "wide"),
    [(torch.float64, None, 8), (torch.bfloat16, None, 4), (torch.float32, Int8(), 4)],
)
def test_each_rank_sends_what_others_need_and_no_more(ranks, dtype, compressor, wide):
    lengths = [2, 6, 4]
    numels = [2 * BATCH * HEADS * length * DIM for length in lengths]
    messages = [padded(dtype.itemsize * numel) for numel in numels]
    if compressor:
        messages = [padded(numel) + padded(4 * -(-numel // 256)) for numel in numels]
    rows = [(causal, lengths, dtype, compressor) for causal in CAUSAL]
    for (causal, *_), found in zip(rows, ranks.run_each(3, count_bytes, rows), strict=True):
        for (forward, backward), parts, of_gradients in zip(found, *SENT[causal], strict=True):
            assert forward == sum(messages[part] for part in parts)
            assert backward == forward + sum(wide * numels[part] for part in of_gradients)


def attend_across(rank, num_keys):
    """Compare attention of queries to keys of other lengths than theirs, also to none at all."""
    num_queries = [1, 3, 0]
    whole = draw(sum(num_queries), sum(num_keys), sum(num_keys), sum(num_queries))
    lengths = num_queries, num_keys, num_keys, num_queries
    places = [places_of(each, causal=False)[rank] for each in lengths]
    parts = [each[:, :, here] for each, here in zip(whole, places, strict=True)]
    ours = with_gradients(ring_attention, *parts)
    if not sum(num_keys):
        return max(each.abs().sum().item() for each in ours)
    theirs = with_gradients(attend_plainly, *whole)
    places = [places[3], *places[:3]]
    theirs = [each[:, :, here] for each, here in zip(theirs, places, strict=True)]
    return max((a - b).abs().sum().item() for a, b in zip(ours, theirs, strict=True))


def test_queries_may_be_fewer_than_keys_and_there_may_be_none(ranks):
    rows = [([2, 0, 5],), ([0, 4, 0],), ([0, 0, 0],)]
    assert max(max(each) for each in ranks.run_each(3, attend_across, rows)) < 1e-12


@on_ranks(2)
def test_autocast_and_a_part_without_need_of_gradients(rank):
    q, k, v = draw(4, 4, 4, dtype=torch.float32, seed=rank)
    plain = with_gradients(ring_attention, q, k, v, q)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = with_gradients(ring_attention, q, k, v, q)
    assert all(map(torch.equal, within, plain))
    ring_attention(q.requires_grad_(), k, v).sum().backward()
    of_q = q.grad.clone()
    q.grad = None
    ring_attention(q, k.requires_grad_(), v.requires_grad_()).sum().backward()
    assert torch.equal(q.grad, of_q)
    with torch.no_grad():
        assert not ring_attention(q, k, v).requires_grad


def test_zigzag_split_gives_each_rank_an_early_and_a_late_chunk():
    tokens = torch.arange(24).view(2, 12)
    parts = [zigzag_split(tokens, rank, 3, dim=1) for rank in range(3)]
    assert [part[0].tolist() for part in parts] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert torch.equal(zigzag_split(tokens, 0, 1, dim=-1), tokens)
    with pytest.raises(ValueError, match=r"must be a multiple of 10, .*, got 12; pad the sequence"):
        zigzag_split(tokens, 0, 5, dim=1)


GROUPED = "repeat the heads of grouped queries by repeat_interleave(..., dim=1)"
FLOATS = "must be float64, float32, bfloat16 or float16"
PLAIN = "compressor must have no state, no draws and messages of a fixed length"
# What rank 1 of two passes instead, and the error of both.
MISTAKES = [
    ({"q": "q"}, "q must be a tensor (batch, heads, length, dim), got 'q'"),
    ({"k": torch.ones(3, 4, 5)}, "k must be a tensor (batch, heads, length, dim), got a tensor of"),
    ({"v": torch.ones(2, 3, 4, 5).long()}, f"v {FLOATS}, like q, got torch.int64"),
    ({"k": torch.ones(2, 3, 4, 5).double()}, f"k {FLOATS}, like q, got torch.float64"),
    (
        {"k": torch.ones(2, 1, 4, 5)},
        f"k must have the batch, heads and dim of q, got [2, 1, 4, 5] and [2, 3, 4, 5]; {GROUPED}",
    ),
    (
        {"v": torch.ones(2, 3, 4, 6)},
        "v must have the shape of k, got [2, 3, 4, 6] and [2, 3, 4, 5]",
    ),
    ({"causal": "zig"}, "causal must be False, True or 'zigzag', got 'zig'"),
    (
        {"q": torch.ones(2, 3, 3, 5), "causal": True},
        "k must be as long as q in causal attention, got [2, 3, 4, 5] and [2, 3, 3, 5]",
    ),
    (
        {"causal": "zigzag", **dict.fromkeys("qkv", torch.ones(2, 3, 3, 5))},
        "k must have an even length with causal='zigzag', got 3; cut it by zigzag_split",
    ),
    ({"scale": "1"}, "scale must be a number or None, got '1'"),
    ({"stats": {}}, "stats must be CommStats or None, got an empty dict"),
    ({"q": torch.ones(2, 3, 4, 5, device="meta")}, "k must be on the device of q, got cpu"),
    ({"compressor": "int8"}, "compressor must be an object such as Int8() or TopK(0.01), got"),
    *[
        ({"compressor": each}, f"{PLAIN}, got {each}; use Int8(), Fp8() or Cast()")
        for each in (TopK(0.01), Int8(seed=0), ErrorFeedback(Int8()), compression.QSGD())
    ],
    (
        {"compressor": Int8(), **dict.fromkeys("qkv", torch.ones(2, 3, 4, 5).double())},
        "q must be float32, bfloat16 or float16 with a compressor, got torch.float64",
    ),
]
BOTH = "all ranks must have the same"
DIFFERENCES = [
    (
        dict.fromkeys("qkv", torch.ones(1, 3, 4, 5)),
        f"{BOTH} batch, heads and dim, got [2, 3, 5] on rank 0 and [1, 3, 5] on rank 1",
    ),
    (
        dict.fromkeys("qkv", torch.ones(2, 3, 4, 5).double()),
        f"{BOTH} dtype, got torch.float32 on rank 0 and torch.float64 on rank 1",
    ),
    ({"causal": True}, f"{BOTH} causal, got False on rank 0 and True on rank 1"),
    ({"scale": 0.5}, f"{BOTH} scale, got None on rank 0 and 0.5 on rank 1"),
    (
        {"compressor": Int8()},
        f"{BOTH} compressor, got None on rank 0 and Int8(block_size=256, seed=",
    ),
    (
        {"q": torch.ones(2, 3, 4, 5, requires_grad=True)},
        f"{BOTH} requires_grad, got False on rank 0 and True on rank 1",
    ),
]


def call(**changes):
    q, k, v = draw(4, 4, 4, dtype=torch.float32)
    return ring_attention(**{"q": q, "k": k, "v": v} | changes)


def find_errors(rank):
    rows = [changes for changes, _ in MISTAKES + DIFFERENCES]
    errors = [error_of(lambda changes=each: call(**changes if rank else {})) for each in rows]
    assert call().shape == (BATCH, HEADS, 4, DIM)  # nothing of them is in the way
    return errors


def test_a_mistake_is_one_error_on_both_ranks(ranks):
    errors, others = ranks.run(2, find_errors)
    assert errors == others
    sentences = [f"rank 1: {text}" for _, text in MISTAKES] + [text for _, text in DIFFERENCES]
    for error, sentence in zip(errors, sentences, strict=True):
        assert error.partition(": ")[2].startswith(sentence), error
    assert errors[0].startswith("ArgumentTypeError")


@on_ranks(2)
def test_a_group_must_have_the_rank(rank):
    group = dist.new_group([0])
    if rank == 0:
        assert torch.equal(call(group=group), call(group=group))
        assert "group must be a process group" in error_of(lambda: call(group=[0]))
    else:
        error = r"group must be a process group with this rank, got .*; call this on its ranks only"
        with pytest.raises(ValueError, match=error):
            call(group=group)


@on_ranks(2)
def test_another_call_on_a_rank_is_an_error_of_both(rank):
    error = error_of(call) if rank else error_of(check_consistent_across_ranks, [], None)
    text = "got a comparison of all ranks' arguments on rank 0 and ring_attention() on rank 1"
    assert text in error


def be_left(rank, place, number):
    """Rank 1 gets a signal before it sends k and v, or before its backward."""
    q, k, v = (each.requires_grad_() for each in draw(4, 4, 4))

    def stop(*_):
        os.kill(os.getpid(), number)

    def step():
        with mock.patch.object(
            Ring, "pack", stop if (rank, place) == (1, "forward") else Ring.pack
        ):
            out = ring_attention(q, k, v)
        if rank == 1:
            stop()
        out.sum().backward()

    with pytest.raises(PeerError) as caught:
        step()
    return caught.value.failed, str(caught.value)


@pytest.mark.slow  # waits until the stopped rank is killed
@pytest.mark.parametrize(
    ("place", "number", "how"),
    [
        ("forward", signal.SIGKILL, "died, or ended without this call"),
        ("backward", signal.SIGKILL, "died, or ended without this call"),
        ("forward", signal.SIGSTOP, "did not respond within the process group's timeout of 5 s"),
    ],
)
def test_ranks_name_a_neighbor_that_is_gone(place, number, how):
    outcomes = observe_ranks(3, be_left, place, number, time_limit=20, group_timeout=5)
    for rank in (0, 2):
        failed, text = outcomes[rank].value
        assert failed == (1,), text
        edges = rf"({rank} -> \d|\d -> {rank})"
        what = rf"rank {rank}: ring_attention's message on edge {edges} was not delivered: "
        assert re.match(f"{what}rank 1 {how}", text), text
