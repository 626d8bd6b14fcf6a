from itertools import product

import torch

from pyparallel.compression import BufferLayout, Piece
from pyparallel.compression.low_rank.matrices import Matrices

LAYER = [
    ("q", (8, 8)),
    ("qb", (8,)),
    ("k", (8, 8)),
    ("kb", (8,)),
    ("up", (32, 8)),
    ("down", (8, 32)),
]


def layout_of(*shapes):
    return BufferLayout(tuple(Piece(str(index), shape) for index, shape in enumerate(shapes)))


def transformer(num_layers):
    return BufferLayout(
        tuple(
            Piece(f"{layer}.{name}", shape) for layer in range(num_layers) for name, shape in LAYER
        )
    )


def test_matrices_are_chosen_by_bytes_saved(subtests):
    for shape, rank, min_ratio, compressed in [
        ((100, 100), 4, 2.0, True),
        ((100, 100), 25, 2.0, False),  # saves no bytes of 16-bit gradients
        ((100, 100), 25, 1.9, True),
        ((100, 4, 5, 5), 4, 2.0, True),  # a convolution
        ((100,), 1, 0.0, False),
        ((), 1, 0.0, False),
        ((5, 3), 4, 2.0, False),
        ((5, 3), 4, 0.0, True),
        ((1, 1), 4, 0.0, True),
        ((0, 3), 4, 0.0, False),
        ((3, 0), 4, 0.0, False),
    ]:
        with subtests.test(f"{shape} {rank} {min_ratio}"):
            matrices = Matrices.of(layout_of(shape), rank, min_ratio, singly=True)
            assert bool(matrices.batches) == compressed
            assert all(
                batch.rank <= min(batch.rows, batch.columns, rank) for batch in matrices.batches
            )


def test_every_entry_has_one_place(subtests):
    layouts = [
        layout_of(),
        layout_of((3,)),
        layout_of((9, 9)),
        layout_of((2,), (9, 9), (3,), (0,), (4, 4), (9, 9), (9, 3, 3), (9, 9), ()),
        transformer(3),
    ]
    for singly, layout in product(
        [True, False],
        layouts,
    ):
        with subtests.test(f"{layout.numel} {singly}"):
            matrices = Matrices.of(layout, 2, 0.9, singly=singly)
            buffer = torch.zeros(2 + layout.numel)[2:]  # views must respect the storage offset
            for batch in matrices.batches:
                batch.view(buffer).add_(1)
            for span in matrices.others(buffer):
                span.add_(1)
            assert buffer.eq(1).all()
            assert matrices.num_others == sum(map(len, matrices.others(buffer)))


def test_a_view_shares_the_parameters_memory():
    layout = transformer(3)
    flat = torch.arange(float(layout.numel))
    by_name = dict(zip(layout.names, layout.split(flat), strict=True))
    batches = Matrices.of(layout, 2, 0.9, singly=False).batches
    assert any(batch.count > 1 for batch in batches)
    for batch in batches:
        for name, matrix in zip(batch.names, batch.view(flat), strict=True):
            assert torch.equal(matrix, by_name[name].flatten(1))


def test_equal_layers_form_one_batch_in_order():
    layout = transformer(12)
    together, apart = (Matrices.of(layout, 1, 1.0, singly=each) for each in (False, True))
    assert len(together.batches) == 4
    assert len(apart.batches) == 48
    assert together.names == apart.names
    assert together.num_left == apart.num_left == 12 * (8 + 8 + 32 + 8)
    assert together.num_right == apart.num_right == 12 * (8 + 8 + 8 + 32)


def test_adjacent_vectors_form_one_span():
    matrices = Matrices.of(layout_of((2,), (3,), (9, 9), (1, 2), (4,)), 2, 1.0, singly=True)
    assert matrices.spans == ((0, 5), (86, 92))


def test_factors_are_contiguous():
    matrices = Matrices.of(layout_of((9, 5), (7, 6)), 2, 0.0, singly=True)
    lefts = matrices.lefts(torch.arange(float(matrices.num_left)))
    rights = matrices.rights(torch.arange(float(matrices.num_right)))
    assert [tuple(each.shape) for each in lefts] == [(1, 9, 2), (1, 7, 2)]
    assert [tuple(each.shape) for each in rights] == [(1, 2, 5), (1, 2, 6)]
    assert (lefts[1].flatten()[0], rights[1].flatten()[0]) == (18, 10)
