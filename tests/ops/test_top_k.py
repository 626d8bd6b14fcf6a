"""``top_k`` and ``scatter_add_``: sample inputs for the harness, and what holds for them alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel.ops import scatter_add_, top_k
from pyparallel.ops.top_k import scatter_add_reference, top_k_reference
from tests.csrc.emulated import emulated
from tests.ops.parity import (
    COMPILED_CPU,
    DTYPES,
    IMPLEMENTATIONS,
    LENGTHS,
    assert_parity,
)

COMPILED = [kind for kind in IMPLEMENTATIONS if "triton" not in kind.name]  # not element-wise
INF, NAN = float("inf"), float("nan")
SPECIAL = torch.tensor([0.0, -0.0, INF, -INF, NAN, -NAN, 1e-40, -1e-45, 3e38, 1.0, -1.0])


def heavy_tailed(numel, seed=0):
    """Student's t with three degrees of freedom, as gradients are."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(4, numel, generator=generator)
    return normal[0] / (normal[1:].square().mean(0).sqrt() + 1e-6)


def arguments_for(x, k, *, residual=None, threshold=None, index_dtype=torch.int32):
    values = torch.full((k,), NAN, dtype=x.dtype)
    indices = torch.full((k,), -7, dtype=index_dtype)
    hint = None if threshold is None else torch.tensor(threshold, dtype=torch.float32)
    return x, residual, hint, values, indices


def sample(numel, k, *, dtype=torch.float32, kept=torch.float32, threshold=0.0, scale=1.0):
    x = (scale * heavy_tailed(numel, numel)).to(dtype)
    residual = None if kept is None else (scale * heavy_tailed(numel, numel + 1)).to(kept)
    return arguments_for(x, k, residual=residual, threshold=threshold)


def kth_magnitude(x, residual, k):
    acc = x.float() if residual is None else x.float() + residual.float()
    return acc.abs().sort(descending=True).values[k - 1].item()


def parity(implementation, arguments):
    assert_parity(implementation, "top_k", top_k_reference, arguments)


@pytest.mark.parametrize("implementation", COMPILED, ids=str)
@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("share", ["none", "one", "some", "all but one", "all"])
def test_lengths_and_counts(implementation, numel, share):
    k = {"none": 0, "one": 1, "some": numel // 50, "all but one": numel - 1, "all": numel}[share]
    parity(implementation, sample(numel, max(0, min(k, numel))))


@pytest.mark.parametrize("implementation", COMPILED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kept", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("threshold", [None, 0.0, "good", 1e30], ids=str)
def test_dtypes_and_ways(implementation, dtype, kept, threshold):
    arguments = sample(10_007, 100, dtype=dtype, kept=kept)
    if threshold == "good":
        threshold = kth_magnitude(*arguments[:2], 103)
    parity(implementation, arguments_for(arguments[0], 100, residual=arguments[1], threshold=threshold))
