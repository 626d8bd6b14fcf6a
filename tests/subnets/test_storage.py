"""Parameters whose memory is released."""

import torch
from torch import nn

from pyparallel.subnets.subnet import allocate, is_released, release


def test_released_parameters_have_no_memory_and_read_as_nan(subtests):
    for dtype in [torch.float32, torch.bfloat16]:
        with subtests.test(str(dtype)):
            layer = nn.Linear(30, 20, dtype=dtype)
            held = list(layer.parameters())
            layer(torch.ones(1, 30, dtype=dtype)).sum().backward()
            release(layer.parameters())
            assert [p.untyped_storage().nbytes() for p in layer.parameters()] == [
                dtype.itemsize
            ] * 2
            assert layer.weight.shape == (20, 30)
            assert layer.weight.grad is None
            assert layer(torch.ones(1, 30, dtype=dtype)).isnan().all()
            assert is_released(layer.weight)
            allocate(layer.parameters())
            assert all(a is b for a, b in zip(held, layer.parameters(), strict=True))
            assert not is_released(layer.weight)
            with torch.no_grad():
                layer.weight.fill_(1)
            assert layer.weight.eq(1).all()


def test_a_single_number_is_never_reported_as_released():
    assert not is_released(nn.Parameter(torch.zeros(())))
    assert not is_released(nn.Parameter(torch.zeros(1, 1)))
