"""Weight prediction by the last update, repeated: for any optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ...training import FlatBuckets
from .base import Prediction, WeightPredictor
from .flat_state import FlatState

LAST_WEIGHTS = "last_weights"


@dataclass(frozen=True)
class LastUpdate(Prediction):
    """The last update of any optimizer, repeated: ``weights + horizon * (weights - last weights)``.

    PipeOptim's idea (Guan et al., arXiv 2312.00839) without knowledge of the optimizer: its
    learning rate, momentum and decoupled weight decay are in the update. It is ``Displacement``'s
    rule for ``torch.optim.Muon``, whose Newton-Schulz iteration is not repeated, and for Lion.

    The weights before it are kept in the optimizer's state, which takes one more copy of them. With
    ``UpdateErrorFeedback`` the update is the corrected one.
    """

    @override
    def attach(self, optimizer: Optimizer, weights: Sequence[FlatBuckets]) -> WeightPredictor:
        return LastUpdatePredictor(optimizer, weights)


@dataclass(eq=False)
class LastUpdatePredictor(WeightPredictor):
    """A predictor whose optimizer's state keeps the weights before the last step, of any dtype."""

    _optimizer: Optimizer
    _weights: Sequence[FlatBuckets]

    def __post_init__(self) -> None:
        self._states = [FlatState(self._optimizer, each) for each in self._weights]

    @override
    @torch.no_grad()
    def step(self, horizon: int = 0, out: Sequence[Tensor] = (), delayed: bool = True) -> None:
        stepped = [[p for p in each.parameters if p.grad is not None] for each in self._weights]
        for each, state in zip(self._weights, self._states, strict=True):
            for last, buffer in zip(state.buffers(LAST_WEIGHTS), each.buffers, strict=True):
                last.copy_(buffer)
        self._optimizer.step()
        # Only now: some optimizers assume that a parameter with any state has all of it.
        for state, parameters in zip(self._states, stepped, strict=True):
            state.publish(LAST_WEIGHTS, parameters)
        if horizon:
            self.predict(horizon, out)

    @override
    @torch.no_grad()
    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        rest = iter(out)
        for each, state in zip(self._weights, self._states, strict=True):
            buffers = state.buffers(LAST_WEIGHTS)
            for parameter, last in zip(each.parameters, state.views(LAST_WEIGHTS), strict=True):
                if LAST_WEIGHTS not in self._optimizer.state.get(parameter, {}):
                    last.copy_(parameter)
            for buffer, last in zip(each.buffers, buffers, strict=True):
                torch.lerp(buffer, last, -float(horizon), out=next(rest))  # in one pass
