"""What the tests of DDP's and FSDP2's hooks share."""

import copy
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from pyparallel.compression import Int8, NonFiniteError
from tests.cases import slow
from tests.workers import assert_equal_on_all_ranks

POLICIES = ("raise", "skip", "allow")  # for gradients that are not finite


def each_policy(compressors):
    """Parametrize by rows of a compressor and a policy: a fast covering set, and all of them."""
    first, *others = compressors
    covering = [*product([first], POLICIES), *zip(others, POLICIES, strict=False)]
    rows = [covering, slow([*product(compressors, POLICIES)])]
    return pytest.mark.parametrize("rows", rows, ids=["covering", "all"])


def average(tensor, group=None):
    tensor = tensor.clone()
    dist.all_reduce(tensor, group=group)
    return tensor / dist.get_world_size(group)


def batches(rank, count, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(*shape, generator=generator).to(dtype) for _ in range(count)]


def backward(model, batch, factor=1.0):
    (model(batch).square().mean() * factor).backward()


def flat_gradients(model):
    gradients = [parameter.grad for parameter in model.parameters()]
    wholes = (each.full_tensor() if isinstance(each, DTensor) else each for each in gradients)
    return torch.cat([each.flatten().float() for each in wholes])


def gradients_of(model, batch, factor=1.0):
    model.zero_grad()
    backward(model, batch, factor)
    return flat_gradients(model)


def check_nan(rank, start, given, policy, sentence):
    """Rank 1 gets a nan in one step; a twin does not take that step, or with zeros on rank 1.

    Args:
        rank: of the process.
        start: returns a model and its hook's state, of a policy.
        given: three batches.
        policy: for gradients that are not finite.
        sentence: of the error that names rank 1.
    """
    (model, state), (twin, _) = start(policy), start("allow")
    good, bad, later = given
    for each, batch in product((model, twin), (good, later)):  # DDP rebuilds its buckets
        gradients_of(each, batch)
    factor = float("nan") if rank == 1 else 1.0
    if policy == "raise":
        before = parts_of(state)
        with pytest.raises(NonFiniteError, match=sentence) as raised:
            gradients_of(model, bad, factor)
        assert_equal_on_all_ranks(str(raised.value))
        for left, right in zip(*map(tree_leaves, (parts_of(state), before)), strict=True):
            assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
        assert torch.equal(gradients_of(twin, later), gradients_of(model, later))
        return
    seen = gradients_of(model, bad, factor)
    if policy == "skip":
        assert torch.equal(seen, gradients_of(twin, bad, 0.0 if rank == 1 else 1.0))
        return
    assert seen.isnan().any()
    assert state.residual_norm < float("inf")
    assert gradients_of(model, later).isfinite().all()


def parts_of(state):
    """Return a copy of what a state has of parameters."""
    saved = copy.deepcopy(state.state_dict())
    return saved.get("parameters", saved)


class CorruptScale(Int8):
    """An Int8 whose second message on rank 1 has an invalid scale."""

    def compress(self, x, state, residual=None):
        codes, scales = super().compress(x, state, residual)
        return codes, scales - 1e9 if state.rank == 1 and state.step == 2 else scales
