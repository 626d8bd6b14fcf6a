"""``orthogonalize_``: samples for the parity harness, and tests of this op alone."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from pyparallel.ops import orthogonalize_
from pyparallel.ops.orthogonalize import orthogonalize_reference
from tests.ops.parity import (
    COMPILED_CPU,
    DTYPES,
    assert_parity,
    assert_refused,
    each_compiled,
    fuzz,
)

SHAPES = [
    (1, 1),
    (5, 5),
    (64, 64),
    (1000, 4),
    (333, 3),
    (4097, 7),
    (200, 33),
    (3, 50, 8),
    (2, 9, 1),
    # Several blocks of a GPU per matrix.
    (6200, 4),
    (2, 2100, 8),
    (800, 23),
]
# An entry of an orthonormal column is at most 1; both sides round it to the matrix's dtype.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def sample(*shapes, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [(scale * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]


def parity(implementation, matrices, tolerance=2e-6):
    assert_parity(
        implementation,
        "orthogonalize_",
        orthogonalize_reference,
        (matrices,),
        rtol=0.0,
        atol=tolerance,
    )


def deviation(matrices):
    """Return the distance of the columns from orthonormal ones."""
    matrices = matrices.double()
    return (matrices.mT @ matrices - torch.eye(matrices.shape[-1])).abs().max().item()


@each_compiled
def test_shapes(implementation):
    for shape in SHAPES:
        parity(implementation, sample(shape))


@each_compiled
def test_many_matrices_of_each_dtype(implementation):
    wide = sample((8, 8), (2, 30, 5))
    for dtype in DTYPES:
        matrices = [*sample((70, 2), (9, 3), (0, 0), (40, 0), dtype=dtype), *wide]
        # More than one launch takes on GPUs.
        copies = [matrix.clone() for matrix in matrices * (12 if dtype is DTYPES[0] else 1)]
        parity(implementation, copies, TOLERANCES[dtype])


@each_compiled
def test_columns_of_any_scale(implementation):
    (matrix,) = sample((500, 5))
    parity(implementation, [matrix * torch.tensor([1e-30, 1e30, 1.0, 1e15, 1e-38])])


@each_compiled
def test_unaligned_matrices(implementation):
    (memory,) = sample((1001,))
    parity(implementation, [memory[1:].view(250, 4)])


@fuzz
@given(st.integers(1, 300), st.integers(0, 64), st.sampled_from(DTYPES))
def test_compiled_cpu_on_anything(rows, columns, dtype):
    (matrix,) = sample((max(rows, columns), columns), dtype=dtype)
    # A square matrix may be close to singular, where rounding decides the last column.
    before = matrix.clone()
    COMPILED_CPU.find("orthogonalize_")([matrix])
    if columns:
        assert deviation(matrix) < 10 * TOLERANCES[dtype]
        left = before.double() - matrix.double() @ (matrix.double().mT @ before.double())
        assert left.norm(dim=0).max() < 30 * TOLERANCES[dtype] * before.double().norm()


RANK_DEFICIENT = {
    "zero": torch.zeros(40, 4),
    "a zero column": torch.randn(40, 4) * torch.tensor([1.0, 0.0, 1.0, 1.0]),
    "rank one": torch.randn(40, 1) @ torch.randn(1, 4),
    "equal columns": torch.randn(40, 1).expand(40, 4).contiguous(),
    "one row holds all": torch.eye(40)[:, :1] * torch.ones(1, 4),
    "square": torch.ones(4, 4),
    "square and zero": torch.zeros(64, 64),
    "denormal": torch.full((40, 4), 1e-45),
    "tall and zero": torch.zeros(5000, 4),
    "tall, equal columns": torch.randn(2, 5000, 1).expand(2, 5000, 4).contiguous(),
    "tall, a zero column": torch.randn(5000, 4) * torch.tensor([1.0, 0.0, 1.0, 1.0]),
}


@each_compiled
def test_is_orthonormal_without_full_rank(implementation):
    for name, matrix in RANK_DEFICIENT.items():
        parity(implementation, [matrix])
        on_device = matrix.clone().to(implementation.device)
        implementation.find("orthogonalize_")([on_device])
        assert deviation(on_device.cpu()) < 2e-6, name


@each_compiled
def test_ill_conditioned_columns_become_orthonormal(implementation):
    base = torch.randn(2000, 1)
    matrix = (base + 1e-4 * torch.randn(2000, 6)).to(implementation.device)
    implementation.find("orthogonalize_")([matrix])
    assert deviation(matrix.cpu()) < 2e-6


@each_compiled
def test_inf_and_nan_propagate(implementation):
    for number in (float("nan"), float("inf")):
        for rows in (100, 6000):
            (matrix,) = sample((rows, 3))
            matrix[50, 1] = number
            matrix = matrix.to(implementation.device)
            implementation.find("orthogonalize_")([matrix])
            assert matrix[:, 1].isnan().all(), f"{number}"


def test_agrees_with_qr_up_to_signs():
    (matrix,) = sample((3000, 12))
    q, r = torch.linalg.qr(matrix.double())
    orthogonalize_([matrix])
    torch.testing.assert_close(matrix.double(), q * r.diagonal().sign(), rtol=0, atol=1e-6)


def test_threads_do_not_change_the_result():
    (matrix,) = sample((20_000, 4))
    results = []
    threads = torch.get_num_threads()
    for number in (1, 2):
        torch.set_num_threads(number)
        results.append(matrix.clone())
        orthogonalize_([results[-1]])
    torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_bad_matrices_are_refused():
    bad = [
        torch.zeros(5),
        torch.zeros(3, 4),
        torch.zeros(100, 65),
        torch.zeros(4, 8).mT,
        torch.zeros(8, 4, dtype=torch.float64),
        torch.zeros(8, 4, dtype=torch.int32),
        torch.zeros(1, 1, 8, 4),
    ]
    good = torch.zeros(4, 2)
    error_text = r"matrices\[1\] must be a contiguous \(m, r\) or \(b, m, r\) tensor .*, got "
    rows = [({"matrices": [good, matrix]}, error_text) for matrix in bad]
    assert_refused(orthogonalize_, dict, rows, dict.values)
    elsewhere = {"matrices": [good, torch.zeros(4, 2, device="meta")]}
    error_text = r"matrices\[1\] must be on the device of matrices\[0\] \(cpu\), got .* on meta"
    assert_refused(orthogonalize_, dict, [(elsewhere, error_text)])
