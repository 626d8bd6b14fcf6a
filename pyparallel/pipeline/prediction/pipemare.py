"""PipeMare's two corrections: earlier weights by their average change, and learning rates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ...ops import predict_sgd
from ...training import FlatBuckets
from .base import WeightPredictor
from .flat_state import FlatState, check_dtypes

AVERAGE_CHANGE = "average_change"
UPDATES = "updates"


@dataclass(eq=False)
class DiscrepancyCorrected(WeightPredictor):
    """A predictor that also estimates earlier weights: PipeMare's discrepancy correction.

    Each update enters a moving average, ``change = decay * change + (1 - decay) * (new - old)``,
    which the optimizer's state keeps; ``k`` updates ago the weights were about
    ``weights - k * change``. This is exact for a constant change, but for the average's start at 0.
    """

    _predictor: WeightPredictor
    _optimizer: Optimizer
    _weights: Sequence[FlatBuckets]
    _decay: float

    def __post_init__(self) -> None:
        check_dtypes(self._weights)
        self._states = [FlatState(self._optimizer, each) for each in self._weights]

    @override
    def step(self, horizon: int = 0, out: Sequence[Tensor] = (), delayed: bool = True) -> None:
        before = [[buffer.clone() for buffer in each.buffers] for each in self._weights]
        stepped = [[p for p in each.parameters if p.grad is not None] for each in self._weights]
        self._predictor.step(horizon, out, delayed)
        for each, state, old, parameters in zip(
            self._weights, self._states, before, stepped, strict=True
        ):
            changes = zip(state.buffers(AVERAGE_CHANGE), each.buffers, old, strict=True)
            for average, new, last in changes:
                average.lerp_(torch.sub(new, last, out=last), 1 - self._decay)
            state.publish(AVERAGE_CHANGE, parameters)

    @override
    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        if horizon > 0:
            self._predictor.predict(horizon, out)
            return
        rest = iter(out)
        for each, state in zip(self._weights, self._states, strict=True):
            for buffer, average in zip(each.buffers, state.buffers(AVERAGE_CHANGE), strict=True):
                predict_sgd(buffer, average, lr=1.0, horizon=-horizon, out=next(rest))


@dataclass(eq=False)
class LRRescheduled(WeightPredictor):
    """A predictor whose steps use a multiple of the optimizer's learning rates.

    The ``lr`` of the groups stays as the user and their scheduler set it; ``factor`` returns its
    factor in delayed update number 0, 1, ..., which is kept in the first parameter group.
    """

    _predictor: WeightPredictor
    _optimizer: Optimizer
    _factor: Callable[[int], float]

    @override
    def step(self, horizon: int = 0, out: Sequence[Tensor] = (), delayed: bool = True) -> None:
        groups = self._optimizer.param_groups
        update = groups[0].get(UPDATES, 0)
        rates = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * (self._factor(update) if delayed else 1)
            self._predictor.step(horizon, out, delayed)
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        groups[0][UPDATES] = update + delayed

    @override
    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        self._predictor.predict(horizon, out)
