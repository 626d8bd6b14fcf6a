"""Draws: a partition in every round, equal on all ranks, independent between cut dimensions."""

import torch

from pyparallel.subnets.partition.unit_assignment import draw_units, sizes

PIECES = [[1, 7, 8], [0, 6, 9], [2, 3, 4, 5]]


def test_pieces_are_a_partition_and_sizes_persist(subtests):
    for units, num in [(8, 4), (7, 3), (5, 5), (9, 1), (10, 4)]:
        with subtests.test(f"{units} {num}"):
            for round_index in range(5):
                pieces = draw_units("w", units, num, seed=1, round_index=round_index)
                assert tuple(map(len, pieces)) == sizes(units, num)
                assert torch.equal(torch.cat(pieces).sort().values, torch.arange(units))
                assert all(torch.equal(piece, piece.sort().values) for piece in pieces)
            assert max(sizes(units, num)) - min(sizes(units, num)) <= 1


def test_rounds_seeds_and_names_are_drawn_independently():
    first = draw_units("w", 64, 2, seed=0, round_index=0)[0].tolist()
    assert first == draw_units("w", 64, 2, seed=0, round_index=0)[0].tolist()
    others = [("w", 0, 1), ("w", 1, 0), ("v", 0, 0)]
    for name, seed, round_index in others:
        assert first != draw_units(name, 64, 2, seed=seed, round_index=round_index)[0].tolist()


def test_draws_are_reproducible():
    pieces = draw_units("layer.0", 10, 3, seed=7, round_index=2)
    assert [piece.tolist() for piece in pieces] == PIECES
