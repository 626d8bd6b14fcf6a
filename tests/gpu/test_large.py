"""Tensors of more than 2**31 elements, whose indices do not fit into 32 bits."""

import math

import pytest
import torch
from torch.utils import _pytree as pytree

from pyparallel.ops import orthogonalize_, random_k, random_k_indices, scatter_add_, top_k
from tests.gpu.catalog import CASES, DEVICE, moved, tensors

TAIL = 2**16
BEGIN = 2**31 if DEVICE.type == "cuda" else 2**18
NUMEL, NUMEL_ON_GPU = BEGIN + TAIL, 2**31 + TAIL
BY_ELEMENTS = [case for case in CASES if case.by_elements]
MARGIN = 2 * 2**30  # bytes, of the context and of a kernel's scratch


def memory() -> float:
    """Return the bytes of the GPU's memory."""
    return torch.cuda.mem_get_info()[1] if DEVICE.type == "cuda" else math.inf


def skip_beyond_the_memory(num_bytes):
    if num_bytes + MARGIN > memory():
        pytest.skip(f"needs {num_bytes / 2**30:.0f} GiB of memory")


def bytes_of(case):
    return sum(each.nbytes for each in tensors(case.sample(TAIL))) * (NUMEL_ON_GPU // TAIL)


def at_the_end(tensor):
    """Return the tensor at the end of one that is longer by as much as NUMEL is than TAIL.

    Scalars, and what has an entry per message, are returned as they are.
    """
    if tensor.numel() < TAIL // 4096:
        return moved(tensor, DEVICE)
    *rows, length = tensor.shape
    whole = torch.zeros(*rows, length * (NUMEL // TAIL), dtype=tensor.dtype, device=DEVICE)
    whole[..., -length:] = tensor.to(DEVICE)
    return whole


@pytest.mark.parametrize("case", BY_ELEMENTS, ids=lambda case: case.op)
def test_elements_beyond_2_31_are_computed(case):
    skip_beyond_the_memory(bytes_of(case))
    tail = case.sample(TAIL)
    whole = pytree.tree_map_only(torch.Tensor, at_the_end, tail)
    case.run(whole)
    ends = pytree.tree_map(
        lambda long, short: (
            long[..., -short.shape[-1] :]
            if isinstance(short, torch.Tensor) and short.dim()
            else long
        ),
        whole,
        tail,
    )
    case.check(ends, tail, f"the last of {NUMEL:,} elements")


def test_entries_beyond_2_31_are_found():
    skip_beyond_the_memory(5 * 4 * NUMEL)
    places = torch.tensor([3, BEGIN - 1, BEGIN, NUMEL - 1], device=DEVICE)
    numbers = torch.tensor([4.0, -5.0, 6.0, -7.0], device=DEVICE)
    x = torch.full((NUMEL,), 0.5, device=DEVICE)
    x[places] = numbers
    for threshold in (None, torch.tensor(3.0, device=DEVICE)):
        residual = torch.zeros(NUMEL, device=DEVICE)
        values, indices = top_k(x, 4, residual=residual, threshold=threshold)
        assert indices.tolist() == places.tolist()
        assert torch.equal(values, numbers)
        assert not residual[places].any()
        assert float(residual[BEGIN - 2]) == 0.5
    scatter_add_(x, numbers, places)
    assert torch.equal(x[places], 2 * numbers)
    drawn = random_k_indices(NUMEL, 1000, seed=1, device=DEVICE)
    assert bool((drawn.diff() > 0).all())
    assert int(drawn[-1]) > 0.98 * NUMEL
    values = random_k(x, 1000, seed=1, residual=None)
    assert torch.equal(values, x[drawn])


def test_a_matrix_of_more_than_2_31_entries_is_orthonormal():
    skip_beyond_the_memory(3 * 4 * NUMEL)
    matrix = torch.randn(NUMEL // 4, 4, device=DEVICE)
    orthogonalize_([matrix])
    product = sum(part.double().mT @ part.double() for part in matrix.split(2**26))
    torch.testing.assert_close(moved(product, "cpu"), torch.eye(4).double(), rtol=0, atol=1e-3)
