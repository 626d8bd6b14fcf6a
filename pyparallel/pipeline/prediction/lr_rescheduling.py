"""Learning rates that depend on how many updates a stage has done."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from .base import WeightPredictor

UPDATES = "updates"


class LRRescheduled:
    """Another foresight, whose steps are taken at a multiple of the optimizer's learning rates.

    The rates themselves stay what the user and their scheduler make them. The count of updates
    stands in the first parameter group, so that it is saved with the optimizer.

    Args:
        foresight: takes the steps.
        optimizer: whose learning rates it reads.
        factor: of the learning rate in update number 0, 1, ...
    """

    def __init__(
        self,
        weight_predictor: WeightPredictor,
        optimizer: Optimizer,
        factor: Callable[[int], float],
    ) -> None:
        self._weight_predictor = weight_predictor
        self._optimizer = optimizer
        self._factor = factor

    def step(self, horizon: int = 0, out: Sequence[Tensor] = ()) -> None:
        """One step at the rate of this update."""
        groups = self._optimizer.param_groups
        update = groups[0].get(UPDATES, 0)
        rates = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * self._factor(update)
            self._weight_predictor.step(horizon, out)
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        groups[0][UPDATES] = update + 1

    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        """As the other does, at the optimizer's rates."""
        self._weight_predictor.predict(horizon, out)
