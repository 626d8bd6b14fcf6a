"""The protocols of weight prediction, no prediction, and that of several optimizers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ...training import FlatBuckets


class WeightPredictor(Protocol):
    """Protocol of an object that steps a stage's optimizer and predicts the stage's weights."""

    def step(self, horizon: int = 0, out: Sequence[Tensor] = (), delayed: bool = True) -> None:
        """Step; with a horizon also write the weights ``horizon`` updates ahead of the new ones.

        Not ``delayed``: the gradients are those of a synchronous update, and are not corrected.
        """

    def skip(self) -> None:
        """Do what is to be done in place of a step that is left out."""
        return

    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        """Write the weights ``horizon`` updates ahead to ``out``, one tensor for each flat buffer.

        A rule that reads the learning rate has, for all these updates, that of the next one: a
        scheduler has stepped before. Changes neither the weights nor the optimizer's state.
        """


class Prediction(Protocol):
    """Protocol of a prediction rule, which a schedule applies to each stage."""

    def attach(self, optimizer: Optimizer, weights: Sequence[FlatBuckets]) -> WeightPredictor:
        """Return the predictor of one stage; a ValueError if the optimizer cannot be predicted.

        ``weights`` has one entry for each parameter group of the optimizer.
        """


@dataclass(frozen=True)
class NoPrediction(Prediction):
    """No prediction, for schedules that read only existing weight versions."""

    @override
    def attach(self, optimizer: Optimizer, weights: Sequence[FlatBuckets]) -> WeightPredictor:
        return _NoPredictor(optimizer)


class _NoPredictor(WeightPredictor):
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @override
    def step(self, horizon: int = 0, out: Sequence[Tensor] = (), delayed: bool = True) -> None:
        if horizon:
            self.predict(horizon, out)
        self._optimizer.step()

    @override
    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        raise RuntimeError(f"horizon must be 0 without weight prediction, got {horizon}")


class JoinedPredictor(WeightPredictor):
    """Several predictors as one, each of the flat buffers, by number, of its own optimizer."""

    def __init__(self, parts: Sequence[tuple[WeightPredictor, int]]) -> None:
        self._parts = parts

    @override
    def step(self, horizon: int = 0, out: Sequence[Tensor] = (), delayed: bool = True) -> None:
        for predictor, own in self._split(out):
            predictor.step(horizon, own, delayed)

    @override
    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        for predictor, own in self._split(out):
            predictor.predict(horizon, own)

    def _split(self, out: Sequence[Tensor]) -> Iterator[tuple[WeightPredictor, list[Tensor]]]:
        rest = iter(out)
        for predictor, count in self._parts:
            yield predictor, list(islice(rest, count))
