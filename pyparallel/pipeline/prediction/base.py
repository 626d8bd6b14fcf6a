"""How the weights of some updates ahead are foreseen: what a schedule chooses, and what it does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from ...comm import FlatBuckets


class WeightPredictor(Protocol):
    """Steps the optimizer of one stage, and says where it will take the weights."""

    def step(self, horizon: int = 0, out: Sequence[Tensor] = ()) -> None:
        """One step; with a horizon, also write the weights that far ahead of the new ones."""

    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        """Write the weights that many updates ahead; changes neither weights nor state."""


class Prediction(Protocol):
    """A rule of prediction, for any stage."""

    def attach(self, optimizer: Optimizer, weights: Sequence[FlatBuckets]) -> WeightPredictor:
        """The rule for one stage.

        Raises:
            ValueError: there is none for this optimizer.
        """


@dataclass(frozen=True)
class NoPrediction:
    """For schedules that read no weights but those that have been."""

    def attach(self, optimizer: Optimizer, weights: Sequence[FlatBuckets]) -> WeightPredictor:
        """Any optimizer will do."""
        return _Plain(optimizer)


class _Plain:
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def step(self, horizon: int = 0, out: Sequence[Tensor] = ()) -> None:
        """The optimizer's own step."""
        if horizon:
            self.predict(horizon, out)
        self._optimizer.step()

    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        """Refused."""
        raise RuntimeError(f"this schedule predicts no weights, got a horizon of {horizon}")
