"""Steps in Triton: one launch for a bucket, which finds the gradients in a table."""

import pytest
import torch

from pyparallel.kernels import _step, adamw_step, sgd_step
from tests.ops.parity import IMPLEMENTATIONS
from tests.ops.test_adamw_step import TestAdamwStep as AdamwTests
from tests.ops.test_sgd_step import TestSgdStep as SgdTests

(LAUNCHED,) = (each for each in IMPLEMENTATIONS if each.name.startswith("triton"))
# 1,000 gradients of 5 elements, a gap, and one with whole blocks, that begins within a block.
SPANS = [*((begin, begin + 5) for begin in range(0, 5000, 5)), (5001, 11000)]


class Counted:
    """A kernel whose launches are counted."""

    def __init__(self, kernel):
        self.kernel, self.grids = kernel, []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return self.kernel[grid]


@pytest.mark.parametrize(("module", "tests"), [(sgd_step, SgdTests), (adamw_step, AdamwTests)])
def test_a_bucket_of_1000_gradients_is_one_launch(module, tests, monkeypatch):
    name = f"_{module.__name__.rpartition('.')[2]}_kernel"
    counted = Counted(getattr(module, name))
    monkeypatch.setattr(module, name, counted)
    dtypes = torch.float32, torch.bfloat16, torch.float32
    tests().parity(LAUNCHED, tests.sample(11500, dtypes=dtypes, spans=SPANS))
    assert counted.grids == [(6,)]


def test_a_table_is_used_again_for_gradients_at_the_same_addresses():
    param, grads = torch.zeros(100), [torch.ones(20), torch.ones(30)]
    _, table, num_rows = _step.grad_table(param, grads, [0, 40])
    first, second = (grad.data_ptr() for grad in grads)
    rows = [[0, first], [20, 0], [40, second], [70, 0], *[[100, 0]] * 4]
    assert (table.tolist(), num_rows) == (rows, 8)
    assert _step.grad_table(param, grads, [0, 40])[1] is table
    for other, offsets in ([grads[1], grads[0]], [0, 40]), (grads, [0, 41]), (grads[:1], [0]):
        assert _step.grad_table(param, other, offsets)[1] is not table
