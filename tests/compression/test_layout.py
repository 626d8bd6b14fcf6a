import torch

from pyparallel.compression import BufferLayout, Piece


def test_pieces_are_contiguous():
    layout = BufferLayout(
        (Piece("a", (2, 3)), Piece("b", ()), Piece("c", (0, 4)), Piece("d", (4,)))
    )
    assert layout.numel == 11
    assert layout.names == ("a", "b", "c", "d")
    assert layout.offsets == (0, 6, 7, 7)
    parts = layout.split(torch.arange(11))
    assert [part.tolist() for part in parts] == [[[0, 1, 2], [3, 4, 5]], 6, [], [7, 8, 9, 10]]


def test_pieces_are_views():
    flat = torch.zeros(5)
    BufferLayout.of([("a", torch.zeros(2)), ("b", torch.zeros(3, 1))]).split(flat)[1].fill_(1)
    assert flat.tolist() == [0, 0, 1, 1, 1]
