"""The rows of the compressors' benchmark, and that PowerSGD is compared with equal work."""

import pytest
import torch

from benchmarks.compression import cost, links
from benchmarks.harness.ranks import run_on_loopback


def raises(sentence):
    if sentence is None:
        raise AssertionError
    raise ValueError(sentence)


def test_errors_are_described_by_their_first_words():
    for sentence, described in [
        ("one\ntwo", "ValueError: one"),
        ("Got the following error when running the callback: IndexError: x", "IndexError: x"),
        (None, "AssertionError: in raises"),
    ]:
        with pytest.raises((ValueError, AssertionError)) as caught:
            raises(sentence)
        assert links.describe(caught.value).endswith(described)


def find_best_approximations(rank):
    """How far the first step of each PowerSGD is from gradients of low rank."""
    layout = cost.transformer(num_layers=2, width=32)
    gradients = torch.randn(layout.numel)
    for part in layout.split(gradients):
        if part.dim() == 2:  # of a rank that both can express
            part.copy_(part[:, :3] @ part[:3])
    errors = []
    for make in (cost.ours, cost.of_torch):
        buffer = gradients.clone()
        with torch.no_grad():
            make(layout)(buffer)
        errors.append(float((buffer - gradients).norm() / gradients.norm()))
    return errors


@pytest.mark.slow
def test_both_power_sgds_do_the_same_work():
    (errors,) = run_on_loopback(1, 60, find_best_approximations)
    assert len(errors) == 2
    assert max(errors) < 1e-4
    assert cost.transformer().numel == 10_646_784
