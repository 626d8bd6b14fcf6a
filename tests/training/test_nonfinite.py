"""What is finite: found in one pass, and to the last entry."""

import pytest
import torch

from pyparallel.training.nonfinite import (
    all_finite,
    count_nonfinite,
    find_policy_error,
    first_nonfinite,
    is_finite,
    is_finite_on_device,
)

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_way_finds_the_same(dtype, subtests):
    largest = torch.full((9,), torch.finfo(dtype).max, dtype=dtype)  # its sum and norm overflow
    for bad in (None, NAN, INF, -INF):
        tensors = [torch.zeros(0, dtype=dtype), torch.ones(5, dtype=dtype), largest.clone()]
        if bad is not None:
            tensors[2][3] = bad
        sound = bad is None
        with subtests.test(str(bad)):
            assert [is_finite(each) for each in tensors] == [True, True, sound]
            assert [bool(is_finite_on_device(each)) for each in tensors] == [True, True, sound]
            assert bool(all_finite(tensors)) == sound
            assert list(map(count_nonfinite, tensors)) == [0, 0, 0 if sound else 1]
            assert first_nonfinite(tensors) == (-1 if sound else 2)
            allowed = bad not in (None, INF, -INF)
            assert bool(is_finite_on_device(tensors[2], allow_inf=True)) != allowed
    assert bool(all_finite([]))
    assert bool(all_finite(tensors[:1]))
    tensors[2][:2] = torch.tensor([INF, -INF])
    assert not is_finite(tensors[2])


def test_what_is_found_on_a_device_is_not_waited_for():
    tensors = [torch.empty(3, device="meta"), torch.empty(0, device="meta")]
    assert all_finite(tensors).is_meta  # to read a value would raise
    assert is_finite_on_device(tensors[0]).is_meta


def test_a_policy_is_one_of_three():
    assert all(find_policy_error(each) is None for each in ("raise", "skip", "allow"))
    error = find_policy_error("never")
    assert error == "nonfinite must be 'raise', 'skip' or 'allow', got 'never'"
    error = find_policy_error(3, ("raise", "skip"))
    assert error == "nonfinite must be 'raise' or 'skip', got 3"
