"""What the pooled head takes the mean over."""

import pytest
import torch

from pyparallel.pipeline.interlocking.standard_heads import PooledHead

POOLED = [
    (None, (3, 6, 4, 2), (2, 3)),
    (None, (3, 6, 4, 2, 2), (2, 3, 4)),
    (1, (3, 6, 4), 2),
    (-1, (3, 4, 6), 1),
    (-1, (3, 4, 2, 6), (1, 2)),
]


def test_the_mean_is_over_all_but_samples_and_features(subtests):
    for dim, shape, pooled in POOLED:
        with subtests.test(dim=dim, shape=shape, pooled=pooled):
            value = torch.randn(shape)
            module = PooledHead(5, dim).build(value)
            weight, bias = module.parameters()
            assert weight.shape == (5, 6)
            torch.testing.assert_close(module(value), value.mean(pooled) @ weight.T + bias)


def test_a_sequence_may_have_another_length_later():
    module = PooledHead(5, dim=-1).build(torch.randn(3, 4, 6))
    assert module(torch.randn(2, 9, 6)).shape == (2, 5)


def test_three_dimensions_need_dim():
    with pytest.raises(ValueError, match=r"dim must be given .* got None for shape \[3, 4, 6\]: "):
        PooledHead(5).build(torch.randn(3, 4, 6))


def test_other_dimensions_are_refused(subtests):
    for dim in [0, 2, True, "last"]:
        with (
            subtests.test(dim=dim),
            pytest.raises(ValueError, match=f"^dim must be 1, -1 or None, got {dim!r}: "),
        ):
            PooledHead(5, dim)
