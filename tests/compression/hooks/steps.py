"""What the tests of DDP's and FSDP2's hooks share."""

import torch.distributed as dist

from pyparallel.compression import Int8


def average(tensor, group=None):
    tensor = tensor.clone()
    dist.all_reduce(tensor, group=group)
    return tensor / dist.get_world_size(group)


def assert_equal_on_all_ranks(value):
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, value)
    assert everywhere == [value] * len(everywhere)


class CorruptScale(Int8):
    """An Int8 whose second message on rank 1 has an invalid scale."""

    def compress(self, x, state, residual=None):
        codes, scales = super().compress(x, state, residual)
        return codes, scales - 1e9 if state.rank == 1 and state.step == 2 else scales
