"""What the tests of hosts, which compare them with loops written by hand, have in common."""

import pytest
import torch
from torch import nn

from pyparallel.compression import ddp_hook
from tests.cases import slow


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


def checks(smoke, *others):
    """Parametrize by the names of a host's checks, of which the first alone is fast."""
    return pytest.mark.parametrize("check", [smoke, *map(slow, others)])
