"""The benchmark of PowerSGD against torch's: both are measured, and do the same work."""

import pytest
import torch

from benchmarks.compression import power_sgd
from pyparallel.compression import BufferLayout
from tests.workers import run_ranks

SMALL = power_sgd.transformer(num_layers=2, width=32)


def measure(rank):
    return power_sgd.measure(2, SMALL), find_best_approximations()


@pytest.fixture(scope="module")
def measured():
    (answer,) = run_ranks(1, measure)
    return answer


def test_both_are_measured_in_every_turn(measured):
    seconds, _ = measured
    assert set(seconds) == {
        f"{method}, {dtype}"
        for method in (power_sgd.OURS, power_sgd.TORCH)
        for dtype in ("float32", "bfloat16")
    }
    assert all(len(each) == 2 and min(each) > 0 for each in seconds.values())


def find_best_approximations():
    """How far the first step of each is from gradients of low rank."""
    gradients = torch.randn(SMALL.numel)
    for part in SMALL.split(gradients):
        if part.dim() == 2:  # of a rank that both can express
            part.copy_(part[:, :3] @ part[:3])
    errors = []
    for make in (power_sgd.ours, power_sgd.of_torch):
        buffer = gradients.clone()
        make(SMALL)(buffer)
        errors.append(float((buffer - gradients).norm() / gradients.norm()))
    return errors


def test_both_do_the_same_work(measured):
    _, errors = measured
    assert len(errors) == 2
    assert max(errors) < 1e-4


def test_the_bucket_is_a_transformer():
    assert power_sgd.transformer().numel == 10_646_784
    assert isinstance(power_sgd.transformer(), BufferLayout)
