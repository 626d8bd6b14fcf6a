"""Blocks that hold SMs all run while a computation is timed, and end with it."""

import pytest
import torch

from benchmarks.ops.held_sms import held


def test_blocks_run_before_and_end_after(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    flags = torch.ones(4, dtype=torch.int32)
    with held(3, lambda count: flags[1 : 1 + count].fill_(1), flags):
        assert flags.tolist() == [0, 1, 1, 1]
    assert flags[0] == 1
    with (
        pytest.raises(RuntimeError, match="1 of 3 blocks run"),
        held(3, lambda count: flags[1].fill_(1), flags),
    ):
        pytest.fail("not all blocks run")
    assert flags[0] == 1
