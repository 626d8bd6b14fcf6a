"""Peers of other libraries step as they are called, and are left out where they are missing."""

import sys
from types import SimpleNamespace

import torch

from benchmarks.harness import measure
from benchmarks.ops import bench_adamw_step, bench_quantize


class Descent:
    def __init__(self, params, lr, **numbers):
        (self.param,), self.lr, self.numbers = params, lr, numbers

    def step(self):
        self.param.data -= self.lr * self.param.grad


def test_flashoptim_steps_beside_ours_where_it_is_installed(monkeypatch, capsys):
    buffers = bench_adamw_step.Buffers("cpu", 64, 1)
    assert buffers.peers == {}
    peers = [measure.Provider("FlashAdamW", buffers.flash_step)]
    case = measure.Case("adamw_step", "step", 64, 8, [measure.Provider("ours", int), *peers])
    monkeypatch.setitem(sys.modules, "flashoptim", None)
    monkeypatch.setattr(measure, "copy_provider", lambda case: measure.Provider("copy", int))
    assert [each.name for each, _ in measure.tried_out(case, 1.0)] == ["ours", "copy"]
    assert "FlashAdamW: left out: ModuleNotFoundError" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "flashoptim", SimpleNamespace(FlashAdamW=Descent))
    before = buffers.param.clone()
    buffers.flash_step()
    assert buffers.flash.numbers == {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    assert torch.equal(buffers.flash.param, before - 1e-3 * buffers.gradients["grad"][0])
    assert torch.equal(buffers.param, before)  # ours has its own


def test_codes_of_torch_ops_are_those_of_the_peer():
    x = torch.randn(512)
    codes, scales = bench_quantize.torch_quantize(x, 8, "int", None, False)
    decoded = codes.view(-1, bench_quantize.BLOCK_SIZE) * scales
    assert (decoded - x.view_as(decoded)).abs().max() <= scales.max() / 2 + 1e-6
