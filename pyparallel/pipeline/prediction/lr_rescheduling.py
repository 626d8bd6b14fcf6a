"""Learning rates that depend on the number of updates a stage has done."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from .base import WeightPredictor

UPDATES = "updates"


class LRRescheduled(WeightPredictor):
    """A predictor whose steps use a multiple of the optimizer's learning rates.

    The ``lr`` of the parameter groups stays as the user and their LR scheduler set it; ``factor``
    returns its factor in update number 0, 1, ... The number of updates is kept in the first
    parameter group, so that it is saved with the optimizer.
    """

    def __init__(
        self, predictor: WeightPredictor, optimizer: Optimizer, factor: Callable[[int], float]
    ) -> None:
        self._predictor = predictor
        self._optimizer = optimizer
        self._factor = factor

    @override
    def step(self, horizon: int = 0, out: Sequence[Tensor] = ()) -> None:
        groups = self._optimizer.param_groups
        update = groups[0].get(UPDATES, 0)
        rates = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * self._factor(update)
            self._predictor.step(horizon, out)
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        groups[0][UPDATES] = update + 1

    @override
    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        self._predictor.predict(horizon, out)
