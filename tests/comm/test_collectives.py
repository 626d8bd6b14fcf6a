"""Collectives of all ranks, what they count, and their errors."""

import time

import pytest
import torch
import torch.distributed as dist

from pyparallel.comm import Run
from pyparallel.comm.collectives import Collectives, CommStats
from pyparallel.comm.consistency import DisagreementError
from tests.workers import on_ranks

LENGTHS = [(3, 0), (0, 0), (5, 2)]


def gather(rank):
    collectives = Collectives()
    mine = tuple(torch.full((n,), float(rank)) for n in LENGTHS[rank])
    return [[t.tolist() for t in each] for each in collectives.all_gather_uneven(mine)]


def test_messages_of_any_length_are_gathered(ranks):
    expected = [[[float(r)] * n for n in lengths] for r, lengths in enumerate(LENGTHS)]
    assert ranks.run(3, gather) == [expected] * 3


def gather_each(rank):
    """Gather tensors of several dtypes, one of them empty, then one alone, then empty ones."""
    collectives = Collectives()
    mine = [
        torch.full((n,), rank, dtype=dtype)
        for n, dtype in (
            (5, torch.uint8),
            (0, torch.float32),
            (3, torch.bfloat16),
            (1, torch.int64),
        )
    ]
    found = collectives.all_gather_each(mine)
    made = [[(t.tolist(), t.dtype, t.data_ptr() % 16) for t in each] for each in found]
    (alone, _, _), empty = collectives.all_gather_each(mine[:1]), mine[1:2]
    nothing = collectives.all_gather_each([*empty, *empty])
    return made, alone[0].tolist(), [[len(t) for t in each] for each in nothing], collectives.stats


def test_tensors_are_gathered_together(ranks):
    dtypes = (torch.uint8, torch.float32, torch.bfloat16, torch.int64)
    expected = [
        [([r] * n, dtype, 0) for n, dtype in zip((5, 0, 3, 1), dtypes, strict=True)]
        for r in range(3)
    ]
    for made, alone, nothing, stats in ranks.run(3, gather_each):
        assert made == expected
        assert (alone, nothing) == ([0] * 5, [[0, 0]] * 3)
        assert (stats.payload_bytes, stats.wire_bytes) == (5 + 6 + 8 + 5, 2 * (5 + 6 + 8 + 5))


def send_parts_around(rank):
    """Send i elements of 10 r + i from rank r to rank i: none to rank 0."""
    collectives = Collectives()
    tensor = torch.cat([torch.full((i,), 10 * rank + i) for i in range(3)])
    received = collectives.all_to_all(tensor, [0, 1, 2], [rank] * 3)
    return received.tolist(), collectives.stats.wire_bytes, collectives.stats.payload_bytes


def test_parts_reach_their_ranks(ranks):
    results = ranks.run(3, send_parts_around)
    assert [received for received, _, _ in results] == [[], [1, 11, 21], [2, 2, 12, 12, 22, 22]]
    assert [sent for _, sent, _ in results] == [24, 16, 8]  # all but the own part
    assert [made for _, _, made in results] == [24, 24, 24]


@on_ranks(4)
def test_sums_and_their_bytes(rank):
    """A ring sends 2 (n - 1) / n of an all-reduce's bytes, and n - 1 times an all-gather's."""
    collectives = Collectives()
    tensor = torch.full((10,), float(rank))
    collectives.all_reduce_(tensor)
    rows = collectives.all_gather(torch.tensor([rank], dtype=torch.uint8))
    empty = torch.zeros(0)
    collectives.all_reduce_(empty)
    assert collectives.all_gather(empty).shape == (4, 0)
    assert (tensor[0], rows.tolist()) == (6, [[0], [1], [2], [3]])
    assert collectives.stats.wire_bytes == 40 * 1.5 + 3


def broadcast(rank):
    """Broadcast in all ranks, and in a group in which rank 2 is the second."""
    pair = dist.new_group([0, 2])
    found = []
    for group in (None, pair):
        if group is None or rank != 1:
            collectives = Collectives(Run(group))
            tensor = torch.full((6,), float(rank))
            collectives.broadcast_(tensor, 1)
            collectives.broadcast_(torch.zeros(0), 1)
            found.append((tensor.tolist(), collectives.stats.wire_bytes))
    return found


def test_a_broadcast_reaches_all_ranks(ranks):
    everywhere, in_the_pair = ([1.0] * 6, 16), ([2.0] * 6, 12)
    expected = [everywhere, in_the_pair]
    assert ranks.run(3, broadcast) == [expected, [everywhere], expected]


def alone(rank):
    collectives = Collectives()
    tensor = torch.arange(3.0)
    collectives.broadcast_(tensor, 0)
    collectives.all_reduce_(tensor)
    assert (collectives.rank, collectives.size, collectives.stats.wire_bytes) == (0, 1, 0)
    assert tensor.tolist() == [0, 1, 2]
    for sizes in ([2], [2, 1]):  # this rank's mistake: no other has died
        with pytest.raises(ValueError, match=r"sizes_out must be of 1 parts of the tensor's 3 "):
            collectives.all_to_all(tensor, sizes, [3])
    assert collectives.all_to_all(tensor, [3], [3]) is tensor
    assert collectives.all_gather(tensor).tolist() == [[0, 1, 2]]
    assert len(collectives.all_gather_uneven((tensor, tensor[:0]))) == 1
    collectives.run.agree([("seed", "0")], None)
    with pytest.raises(DisagreementError, match=r"^rank 0: it is wrong$"):
        collectives.run.agree([], "it is wrong")
    assert collectives.stats.wire_bytes == 0


def test_one_rank_sends_nothing_and_needs_no_group(ranks):
    alone(0)
    ranks.run(1, alone)


@on_ranks(2)
def test_every_dtype_is_sent(rank):
    """Broadcast a transposed tensor of rank 1, and swap entries with it, outside of the count."""
    collectives = Collectives()
    with collectives.uncounted():
        for dtype in (torch.bool, torch.int8, torch.bfloat16, torch.float8_e4m3fn, torch.complex64):
            strided = torch.tensor([[rank, 1], [0, rank]]).to(dtype).T
            collectives.broadcast_(strided, 1)
            swapped = collectives.all_to_all(torch.tensor([rank, rank]).to(dtype), [1, 1], [1, 1])
            assert strided.to(torch.int64).tolist() == [[1, 0], [1, 1]]
            assert swapped.to(torch.int64).tolist() == [0, 1]
    assert collectives.stats.wire_bytes == 0


def make_a_mistake(rank):
    collectives = Collectives()
    collectives.run.counts.reset(4)
    collectives.all_to_all(torch.ones(2), [1, 1], [1, 1] if rank else [2])


def test_a_mistake_of_a_rank_is_not_blamed_on_another(ranks):
    first, second = ranks.observe(2, make_a_mistake, group_timeout=5)
    problem = "Number of tensor splits not equal to group size"
    assert first.error == (
        f"PeerError: rank 0, step 4: the all-to-all failed on this rank: {problem}"
    )
    expected = f"PeerError: rank 1, step 4: the all-to-all failed: rank 0 failed: {problem} ("
    assert second.error.startswith(expected), second.error


@on_ranks(3)
def test_no_rank_leaves_a_barrier_before_all_have_entered(rank):
    store, barrier = dist.group.WORLD.get_group_store(), Run().barrier
    store.set(f"here/{rank}", "")
    barrier()
    assert store.check([f"here/{other}" for other in range(3)])


def test_bytes_and_seconds_add_up():
    stats = CommStats()
    stats.count(torch.zeros(5, dtype=torch.bfloat16), 1.5)
    stats.count(torch.zeros(2, dtype=torch.uint8), 0)
    assert (stats.payload_bytes, stats.wire_bytes) == (12, 15.0)
    for _ in range(2):
        with stats.encoding():
            time.sleep(0.002)
    assert stats.encode_seconds >= 0.004
    assert stats.decode_seconds == 0
