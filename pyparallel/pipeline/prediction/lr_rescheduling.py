"""Learning rates that depend on the number of updates a stage has done."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from .base import WeightPredictor

UPDATES = "updates"


@dataclass(eq=False)
class LRRescheduled(WeightPredictor):
    """A predictor whose steps use a multiple of the optimizer's learning rates.

    The ``lr`` of the groups stays as the user and their scheduler set it; ``factor`` returns its
    factor in update number 0, 1, ..., which is kept in the first parameter group.
    """

    _predictor: WeightPredictor
    _optimizer: Optimizer
    _factor: Callable[[int], float]

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
