"""What metrics() of the hooks of DDP and FSDP2 returns, against values computed in other ways."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pyparallel.compression import Cast, ErrorFeedback, Int8, TopK, compress_ddp, compress_fsdp

WIDTH = 32
SECONDS = {f"rank/{what}_seconds" for what in ("waiting", "encode", "decode")}
NAMES = {"rank/bytes_sent", "rank/residual_norm", "rank/steps", *SECONDS}


def train(rank, model, num_steps, slow_step=None):
    """Take steps; rank 0 sleeps between forward and backward of one."""
    for index in range(num_steps):
        model.zero_grad()
        loss = model(torch.randn(4, WIDTH)).square().mean()
        if index == slow_step:
            dist.barrier()
            time.sleep(0.3 if rank == 0 else 0)
        loss.backward()


def start_ddp(compressor, **options):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(WIDTH, WIDTH, bias=False), **options)
    state = compress_ddp(ddp, compressor)
    return ddp, state


def start_fsdp(compressor):
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    fully_shard(model)
    return model, compress_fsdp(model, gradients=compressor)


STARTS = {
    "future": lambda: start_ddp(Cast()),
    "thread": lambda: start_ddp(ErrorFeedback(TopK(0.25))),
    "unused": lambda: start_ddp(Int8(), find_unused_parameters=True),
    "fsdp": lambda: start_fsdp(ErrorFeedback(Int8())),
}


def residual_by_hand(state):
    saved = state.state_dict()
    parts = saved["gradients"].values() if "gradients" in saved else [saved]
    residuals = [
        tensors["residual"].flatten()
        for part in parts
        for tensors in part["parameters"].values()
        if "residual" in tensors
    ]
    return float(torch.cat(residuals).norm()) if residuals else 0.0


def measure(rank):
    found = {}
    for name, begin in STARTS.items():
        model, state = begin()
        assert state.metrics() == dict.fromkeys(NAMES, 0.0), state.metrics()
        train(rank, model, 3)
        first = state.metrics(), residual_by_hand(state)
        train(rank, model, 1, slow_step=0)
        found[name] = *first, state.metrics()
    return found


NUMEL = WIDTH * WIDTH
BYTES_PER_STEP = {  # of two ranks
    "future": 2 * NUMEL / 2 * 2,  # a ring's all-reduce of 16 bits: 2 (n - 1) / n
    "thread": NUMEL / 4 * (4 + 4),  # an all-gather of values and indices: n - 1
    # The shard of the other rank: a byte each, a scale for 256; and whether one was corrupt.
    "fsdp": NUMEL / 2 * (1 + 4 / 256) + 8,
}


def test_metrics_are_bytes_waits_and_residuals(ranks, subtests):
    results = ranks.run(2, measure)
    for name in results[0]:
        with subtests.test(name=name):
            for rank, found in enumerate(results):
                metrics, residual_norm, after = found[name]
                assert metrics.keys() == NAMES
                assert all(type(value) is float for value in metrics.values())
                assert metrics["rank/steps"] == 3
                assert after["rank/steps"] == 4
                assert after["rank/bytes_sent"] == metrics["rank/bytes_sent"] / 3 * 4 > 0
                if name in BYTES_PER_STEP:
                    assert metrics["rank/bytes_sent"] == 3 * BYTES_PER_STEP[name]
                assert metrics["rank/residual_norm"] == pytest.approx(residual_norm, rel=1e-6)
                assert (residual_norm > 0) == (name in ("thread", "fsdp"))
                assert 0 < metrics["rank/encode_seconds"] < 1
                if rank == 0:
                    assert 0 <= after["rank/waiting_seconds"] < 0.2
                else:
                    assert 0.2 < after["rank/waiting_seconds"] < 5
