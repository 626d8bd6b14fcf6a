"""Weights as they were some updates ago, from the average of their changes."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...comm import FlatBuckets
from ...ops import predict_sgd
from .base import WeightPredictor
from .flat_state import FlatState

AVERAGE_CHANGE = "average_change"


class DiscrepancyCorrected:
    """Another foresight, which also looks back: PipeMare's discrepancy correction.

    Each update enters an average, ``change = decay * change + (1 - decay) * (new - old)``, and
    ``k`` updates ago the weights were about ``weights - k * change``: exactly, if they have always
    changed by the same, up to the bias of an average that began at 0.

    Args:
        foresight: takes the steps.
        optimizer: in whose state the average is kept, so that it is saved with it.
        weights: one for each of its parameter groups.
        decay: of the average, in each update.
    """

    def __init__(
        self,
        weight_predictor: WeightPredictor,
        optimizer: Optimizer,
        weights: Sequence[FlatBuckets],
        decay: float,
    ) -> None:
        self._weight_predictor = weight_predictor
        self._optimizer = optimizer
        self._weights = weights
        self._decay = decay
        self._states = [FlatState(optimizer, each) for each in weights]

    def step(self, horizon: int = 0, out: Sequence[Tensor] = ()) -> None:
        """One step, whose change is remembered."""
        before = [[buffer.clone() for buffer in each.buffers] for each in self._weights]
        stepped = [[p for p in each.parameters if p.grad is not None] for each in self._weights]
        self._weight_predictor.step(horizon, out)
        for each, state, old, parameters in zip(
            self._weights, self._states, before, stepped, strict=True
        ):
            changes = zip(state.buffers(AVERAGE_CHANGE), each.buffers, old, strict=True)
            for average, new, last in changes:
                average.lerp_(torch.sub(new, last, out=last), 1 - self._decay)
            state.publish(AVERAGE_CHANGE, parameters)

    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        """Backward, for a horizon below 0; forward as the other does."""
        if horizon > 0:
            self._weight_predictor.predict(horizon, out)
            return
        rest = iter(out)
        for each, state in zip(self._weights, self._states, strict=True):
            for buffer, average in zip(each.buffers, state.buffers(AVERAGE_CHANGE), strict=True):
                predict_sgd(buffer, average, lr=1.0, horizon=-horizon, out=next(rest))
