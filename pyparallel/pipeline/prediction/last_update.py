"""Weight prediction by the last update, repeated: for any optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import FlatBuckets
from .base import Prediction, WeightPredictor
from .flat_state import FlatState

LAST_UPDATE = "last_update"


@dataclass(frozen=True)
class LastUpdate(Prediction):
    """The last update of any optimizer, repeated: ``weights + horizon * (weights - last weights)``.

    PipeOptim's idea (Guan et al., arXiv 2312.00839) without knowledge of the optimizer: its
    learning rate, momentum and decoupled weight decay are in the update. It is ``Displacement``'s
    rule for ``torch.optim.Muon``, whose Newton-Schulz iteration is not repeated, and for Lion.

    The update is kept in the optimizer's state, which takes one more copy of the weights' size. A
    prediction after a change of the learning rate is still at the rate of the last update, and with
    ``UpdateErrorFeedback`` that update is the uncorrected one.
    """

    @override
    def attach(self, optimizer: Optimizer, weights: Sequence[FlatBuckets]) -> WeightPredictor:
        return LastUpdatePredictor(optimizer, weights)


class LastUpdatePredictor(WeightPredictor):
    """A predictor that keeps what the last step has subtracted from the weights.

    Args:
        optimizer: steps the parameters; keeps the update in its state, so that it is saved with it.
        weights: one entry for each of its parameter groups; of any floating-point dtype.
    """

    def __init__(self, optimizer: Optimizer, weights: Sequence[FlatBuckets]) -> None:
        self._optimizer = optimizer
        self._weights = weights
        self._states = [FlatState(optimizer, each) for each in weights]

    @override
    @torch.no_grad()
    def step(self, horizon: int = 0, out: Sequence[Tensor] = ()) -> None:
        stepped = [[p for p in each.parameters if p.grad is not None] for each in self._weights]
        updates = [state.buffers(LAST_UPDATE) for state in self._states]
        for each, of_group in zip(self._weights, updates, strict=True):
            for update, buffer in zip(of_group, each.buffers, strict=True):
                update.copy_(buffer)
        self._optimizer.step()
        for each, of_group in zip(self._weights, updates, strict=True):
            for update, buffer in zip(of_group, each.buffers, strict=True):
                torch.sub(update, buffer, out=update)
        # Only now: some optimizers assume that a parameter with any state has all of it.
        for state, parameters in zip(self._states, stepped, strict=True):
            state.publish(LAST_UPDATE, parameters)
        if horizon:
            self.predict(horizon, out)

    @override
    @torch.no_grad()
    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        """Predict the weights; copy the live ones before the first step."""
        rest = iter(out)
        for each, state in zip(self._weights, self._states, strict=True):
            for buffer, update in zip(each.buffers, state.buffers(LAST_UPDATE), strict=True):
                torch.sub(buffer, update, alpha=horizon, out=next(rest))
