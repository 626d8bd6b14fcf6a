"""Layers that take a given time on a fake clock."""

from importlib import import_module
from types import SimpleNamespace

import torch
from torch import nn


class Clock:
    """A fake clock, advanced by the layers."""

    def __init__(self):
        self.now = 0.0

    def install(self, monkeypatch):
        """Replace the clock that the profiler measures by."""
        module = import_module("pyparallel.pipeline.partition.profile")
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))


class Takes(nn.Module):
    """A layer of given seconds in the forward and the backward; in its first two runs far more."""

    def __init__(self, clock, forward, backward=0.0):
        super().__init__()
        self.clock, self.seconds = clock, [forward, backward]
        self.w = nn.Parameter(torch.ones(()))
        self.runs = 0

    def forward(self, x):
        return Pass.apply(x, self.w, self)

    def take(self, which):
        self.runs += 1
        self.clock.now += 1000 if self.runs <= 2 else self.seconds[which]


class Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, layer):
        ctx.layer = layer
        layer.take(0)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.take(1)
        return gradient, gradient.sum(), None
