"""What the loops written by hand, with which hosts are compared, have in common."""

import torch
from torch import nn

from pyparallel.compression import ddp_hook


def compressed_ddp(module, compressor):
    """Return a DistributedDataParallel that compresses, and the state of its hook."""
    ddp = nn.parallel.DistributedDataParallel(module)
    state, hook = ddp_hook(compressor, ddp)
    ddp.register_comm_hook(state, hook)
    return ddp, state


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
