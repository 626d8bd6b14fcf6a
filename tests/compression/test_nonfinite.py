"""The check for gradients with a nan or an inf, on the CPU and as on a GPU."""

import pytest
import torch

from pyparallel.compression import Collectives, NonFiniteError
from pyparallel.compression.layout import BufferLayout
from pyparallel.compression.nonfinite import NonFiniteCheck, first_nonfinite_part
from pyparallel.recommend.profile import SingleRankCollectives
from pyparallel.training.nonfinite import is_finite

NAN, INF = float("nan"), float("inf")
PARAMETERS = {"a": torch.empty(2, 3), "empty": torch.empty(0), "b": torch.ones(4)}
LAYOUT = BufferLayout.of(PARAMETERS.items())


def test_what_is_finite(subtests):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with subtests.test(str(dtype)):
            largest = torch.full((10,), torch.finfo(dtype).max, dtype=dtype)
            assert is_finite(largest)  # though its sum is not
            assert is_finite(largest[:0])
            assert first_nonfinite_part(largest, LAYOUT) == -1
            for bad in (NAN, INF, -INF):
                for place, piece in ((5, 0), (6, 2)):
                    x = torch.zeros(10, dtype=dtype)
                    x[place] = bad
                    assert first_nonfinite_part(x, LAYOUT) == piece
            x[:2] = torch.tensor([INF, -INF])
            assert first_nonfinite_part(x, LAYOUT) == 0


def test_a_gpus_buffer_counts_as_zeros_and_all_ranks_raise_in_the_next_step():
    """What runs on a GPU, on tensors of the CPU."""
    check, collectives = NonFiniteCheck("raise"), Collectives()
    for step, bad in enumerate((1.0, NAN)):
        for _ in range(2):  # buffers of a step
            x = torch.ones(10)
            x[3] *= bad
            check._apply_on_device_(x, LAYOUT, collectives, step)
            assert x.sum() == (0 if step else 10)
    with pytest.raises(NonFiniteError, match=r"rank 0 in one of a to b in step 1"):
        check._apply_on_device_(torch.ones(10), LAYOUT, collectives, 2)
    check._apply_on_device_(torch.ones(10), LAYOUT, collectives, 3)  # once for a step


def test_the_host_waits_for_nothing(subtests):
    x = torch.empty(10, device="meta")  # to read a value would raise
    for policy in ("skip", "allow"):
        with subtests.test(policy):
            NonFiniteCheck(policy).apply_(x, LAYOUT, SingleRankCollectives(3), 0)
