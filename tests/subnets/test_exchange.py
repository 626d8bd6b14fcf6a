"""Averages of the tensors that all subnets hold in full."""

from functools import partial
from itertools import product

import torch

from pyparallel.comm import Collectives
from pyparallel.subnets.exchange import average
from tests.compression.local_collectives import run_locally

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def test_the_average_of_equal_values_is_exact(subtests):
    for num, dtype in product([2, 3, 5, 7], DTYPES):
        with subtests.test(f"{num} {dtype}"):
            values = torch.randn(
                1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64
            )
            values = values.to(dtype)
            for (mean,) in run_locally(num, partial(average, [values])):
                assert mean.dtype == dtype
                assert torch.equal(mean, values)


def test_tensors_of_several_dtypes_are_averaged_each_in_its_own():
    def run(collectives):
        tensors = [torch.full((2, 3), float(collectives.rank), dtype=dtype) for dtype in DTYPES]
        return average([*tensors, torch.tensor(4.0 * collectives.rank)], collectives)

    for means in run_locally(3, run):
        assert [mean.dtype for mean in means] == [*DTYPES, torch.float32]
        assert all(mean.eq(1).all() and mean.shape == (2, 3) for mean in means[:4])
        assert means[4] == 4


def test_infinities_stay():
    mask = torch.tensor([0.0, -torch.inf], dtype=torch.float64)
    for (mean,) in run_locally(2, lambda collectives: average([mask], collectives)):
        assert torch.equal(mean, mask)


def test_a_single_rank_gets_its_own_tensors():
    tensor = torch.randn(3)
    (mean,) = average([tensor], Collectives())
    assert mean is tensor
