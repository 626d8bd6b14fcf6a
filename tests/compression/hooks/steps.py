"""What the tests of DDP's and FSDP2's hooks share."""

from itertools import product

import pytest
import torch.distributed as dist

from pyparallel.compression import Int8
from tests.cases import slow

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


class CorruptScale(Int8):
    """An Int8 whose second message on rank 1 has an invalid scale."""

    def compress(self, x, state, residual=None):
        codes, scales = super().compress(x, state, residual)
        return codes, scales - 1e9 if state.rank == 1 and state.step == 2 else scales
