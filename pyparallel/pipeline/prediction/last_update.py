"""Weight prediction by the last update, repeated: for any optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ...training import FlatBuckets
from .base import NoPrediction, Prediction, WeightPredictor
from .corrections import Correction, DelayedOptimizer
from .flat_state import FlatState

LAST_UPDATE = "last_update"


@dataclass(frozen=True)
class LastUpdate(Prediction):
    """The last update of any optimizer, repeated: ``weights + horizon * last update``.

    PipeOptim's idea (Guan et al., arXiv 2312.00839) without knowledge of the optimizer: its
    learning rate, momentum and decoupled weight decay are in the update. It is ``Displacement``'s
    rule for ``torch.optim.Muon``, whose Newton-Schulz iteration is not repeated, and for Lion.

    The update is kept in the optimizer's state, which takes one more copy of the weights. With
    ``UpdateErrorFeedback`` it is the corrected one. What else changes the weights, such as an
    average with other replicas or a state that is loaded, is not repeated.
    """

    @override
    def attach(self, optimizer: Optimizer, weights: Sequence[FlatBuckets]) -> WeightPredictor:
        return LastUpdatePredictor(optimizer, weights)


class LastUpdatePredictor(WeightPredictor):
    """A predictor whose optimizer's state keeps the last update, of any dtype.

    ``stepper`` takes the steps, corrected ones; None: the optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        weights: Sequence[FlatBuckets],
        stepper: WeightPredictor | None = None,
    ) -> None:
        self._optimizer, self._weights = optimizer, weights
        self._stepper = stepper or NoPrediction().attach(optimizer, weights)
        self._states = [FlatState(optimizer, each) for each in weights]

    @override
    @torch.no_grad()
    def step(self, horizon: int = 0, out: Sequence[Tensor] = (), delayed: bool = True) -> None:
        stepped = [[p for p in each.parameters if p.grad is not None] for each in self._weights]
        updates = self._updates()
        for buffer, update in updates:
            update.copy_(buffer)
        try:
            self._stepper.step(delayed=delayed)
        except BaseException:
            for _, update in updates:
                update.zero_()  # not the weights, in a state that is rescued
            raise
        for buffer, update in updates:
            torch.sub(buffer, update, out=update)
        # Only now: some optimizers assume that a parameter with any state has all of it.
        for state, parameters in zip(self._states, stepped, strict=True):
            state.publish(LAST_UPDATE, parameters)
        if horizon:
            self.predict(horizon, out)

    @override
    @torch.no_grad()
    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        for (buffer, update), output in zip(self._updates(), out, strict=True):
            torch.add(buffer, update, alpha=horizon, out=output)

    def _updates(self) -> list[tuple[Tensor, Tensor]]:
        """Return each flat buffer of the weights with that of the last update, 0 at first."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for each, state in zip(self._weights, self._states, strict=True):
            pairs += zip(each.buffers, state.buffers(LAST_UPDATE), strict=True)
        return pairs


def wrap_corrected(
    correction: Correction, predictor: WeightPredictor, delayed: DelayedOptimizer
) -> WeightPredictor:
    """Return a predictor of corrected steps: the last update that is repeated is corrected too."""
    if not isinstance(predictor, LastUpdatePredictor):
        return correction.wrap(predictor, delayed)
    optimizer, weights, *_ = delayed
    stepper = correction.wrap(NoPrediction().attach(optimizer, weights), delayed)
    return LastUpdatePredictor(optimizer, weights, stepper)
