"""Predictions with known values: the true weights, or the horizon itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from pyparallel.training import FlatBuckets
from tests.pipeline.reference import last_step


@dataclass(frozen=True)
class LastStep:
    """The reference's rule, in any dtype."""

    def displacement(self, parameter, state, group, horizon):
        return -group["lr"] * horizon * last_step(group, state, parameter.grad)


@dataclass(frozen=True)
class Oracle:
    """Predicts from a recorded training: lists of the model's parameters, one for each update."""

    versions: Sequence[Sequence[Tensor]] = field(repr=False)

    def attach(self, optimizer: Optimizer, weights: Sequence[FlatBuckets]) -> "OraclePredictor":
        (buckets,) = weights
        return OraclePredictor(optimizer, buckets, self.versions)


class OraclePredictor:
    """The predictor of a stage, located by its parameters in the first version."""

    def __init__(self, optimizer: Optimizer, buckets: FlatBuckets, versions):
        self.optimizer = optimizer
        (buffer,) = buckets.buffers
        own = buckets.parameters
        begin = next(i for i, p in enumerate(versions[0]) if torch.equal(p, own[0]))
        self.versions = [version[begin : begin + len(own)] for version in versions]
        assert all(torch.equal(a, b) for a, b in zip(self.versions[0], own, strict=True))
        bytes_before = [parameter.data_ptr() - buffer.data_ptr() for parameter in own]
        self.offsets = [each // buffer.element_size() for each in bytes_before]
        self.now = 0

    def step(self, horizon: int = 0, out: Sequence[Tensor] = (), delayed: bool = True) -> None:
        self.optimizer.step()
        self.now += 1
        if horizon:
            self.predict(horizon, out)

    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        # The last predictions may be beyond the training, and are never read.
        then = min(self.now + horizon, len(self.versions) - 1)
        for offset, truth in zip(self.offsets, self.versions[then], strict=True):
            out[0][offset : offset + truth.numel()] = truth.flatten()
