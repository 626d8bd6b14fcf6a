"""Replicas of any numbers of shards: every rank gets each of its rows once from each replica."""

import itertools

import pytest
import torch

from pyparallel.gossip.messages.overlaps import Overlaps

SHAPES = [(1,), (2, 3), (5, 2, 2), (12,), (17, 1), (0, 4), (31, 2)]
GAP = 3  # entries between two shards


def hold(ranks, rank):
    """Return what a rank holds, the number of each entry in the model, and parameters' offsets."""
    flat, placed, first = [], [], 0
    for shape in SHAPES:
        whole = torch.arange(first, first + torch.Size(shape).numel()).view(shape)
        first += whole.numel()
        chunks = whole.chunk(len(ranks)) if len(whole) else []
        index = ranks.index(rank)
        placed.append((torch.empty(shape, device="meta"), sum(map(len, flat))))
        flat += [chunks[index].flatten() if index < len(chunks) else whole[:0].flatten()]
        flat += [torch.full((GAP,), -1)]
    return torch.cat(flat), placed


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2, 1), (1, 5), (8, 3), (4, 7, 4), (2, 2)])
def test_ranks_get_all_their_rows_from_each_replica(sizes):
    numbers = itertools.count()
    replicas = [[next(numbers) for _ in range(size)] for size in sizes]
    held = {rank: hold(ranks, rank) for ranks in replicas for rank in ranks}
    overlaps = {rank: Overlaps(replicas, rank, held[rank][1]) for rank in held}
    for sender, receivers in itertools.permutations(range(len(sizes)), 2):
        for receiver in replicas[receivers]:
            own = held[receiver][0]
            got = torch.full_like(own, -1)
            peers, parts, _ = overlaps[receiver].route([sender], [[got]])
            assert peers, "a rank gets a header from each replica"
            for peer, into in zip(peers, parts, strict=True):
                routed = overlaps[peer].route([receivers], [[held[peer][0]]])
                sent = dict(zip(routed[0], routed[1], strict=True))[receiver]
                assert [len(each) for each in sent] == [len(each) for each in into]
                for message, place in zip(sent, into, strict=True):
                    assert (place == -1).all(), "twice"
                    place.copy_(message)
            assert torch.equal(got, own)


def test_pairs_know_of_each_other():
    replicas = [[0, 1, 2], [3, 4, 5, 6, 7], [8, 9]]
    held = {rank: hold(ranks, rank) for ranks in replicas for rank in ranks}
    overlaps = {rank: Overlaps(replicas, rank, held[rank][1]) for rank in held}
    for index, ranks in enumerate(replicas):
        for rank in ranks:
            others = [each for each in range(3) if each != index]
            peers, _, places = overlaps[rank].route(others, [[held[rank][0]]] * 2)
            assert overlaps[rank].replica == index
            assert [others[place] for place in places] == [
                next(i for i, each in enumerate(replicas) if peer in each) for peer in peers
            ]
            for peer in peers:
                assert rank in overlaps[peer].route([index], [[held[peer][0]]])[0]
