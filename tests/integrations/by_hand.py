"""What the tests of hosts, which compare them with loops written by hand, have in common."""

import contextlib

import pytest
import torch
from torch import nn

from pyparallel.compression import compress_ddp
from tests.cases import slow


def compressed_ddp(module, compressor):
    """Return a DistributedDataParallel that compresses, and the state of its hook."""
    ddp = nn.parallel.DistributedDataParallel(module)
    state = compress_ddp(ddp, compressor)
    return ddp, state


def train(model, optimizers, batches, accumulated=1, clip=None, dtype=None):
    """Fit batches to themselves; return the losses."""
    losses = []
    for index, batch in enumerate(batches, 1):
        with model.no_sync() if index % accumulated else contextlib.nullcontext():
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = nn.functional.mse_loss(model(batch), batch)
            losses.append(loss.item())
            (loss / accumulated).backward()
        if index % accumulated == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            for each in optimizers:
                each.step()
                each.zero_grad()
    return losses


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def checks(smoke, *others):
    """Parametrize by the names of a host's checks, of which the first alone is fast."""
    return pytest.mark.parametrize("check", [smoke, *map(slow, others)])
