"""The predictors of a stage with several optimizers."""

from collections.abc import Iterator, Sequence
from itertools import islice

from torch import Tensor
from typing_extensions import override

from .base import WeightPredictor


class JoinedPredictor(WeightPredictor):
    """Several predictors as one, each of the flat buffers, by number, of its own optimizer."""

    def __init__(self, parts: Sequence[tuple[WeightPredictor, int]]) -> None:
        self._parts = parts

    @override
    def step(self, horizon: int = 0, out: Sequence[Tensor] = ()) -> None:
        for predictor, own in self._split(out):
            predictor.step(horizon, own)

    @override
    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        for predictor, own in self._split(out):
            predictor.predict(horizon, own)

    def _split(self, out: Sequence[Tensor]) -> Iterator[tuple[WeightPredictor, list[Tensor]]]:
        rest = iter(out)
        for predictor, count in self._parts:
            yield predictor, list(islice(rest, count))
