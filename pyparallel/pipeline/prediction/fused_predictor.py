"""Weight prediction by the pass that steps a fused optimizer."""

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from ...optim import SGD, FusedOptimizer
from .base import WeightPredictor


class FusedPredictor(WeightPredictor):
    """A predictor of an optimizer of ``pyparallel.optim``: its step writes the prediction.

    The optimizer is laid out, and steps only through this object from now on.
    """

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._optimizer = optimizer
        self._horizon = 0
        self._out: Sequence[Tensor] = ()
        if isinstance(optimizer, SGD):
            optimizer.keeps_last_gradient = True
        optimizer.adopt(self._step_buckets)

    @override
    def step(self, horizon: int = 0, out: Sequence[Tensor] = ()) -> None:
        self._horizon, self._out = horizon, out
        self._optimizer.step()  # with its hooks, as a scheduler needs them

    @override
    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        for index, output in enumerate(out):
            self._optimizer.predict_bucket(index, horizon, output)

    def _step_buckets(self, optimizer: FusedOptimizer) -> None:
        for index in range(optimizer.num_buckets):
            prediction = self._out[index] if self._horizon else None
            optimizer.step_bucket(index, horizon=self._horizon, prediction=prediction)
