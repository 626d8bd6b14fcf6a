"""Losses whose minimum is known: quadratics and logistic regression, a shard on each rank."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

import numpy as np
from typing_extensions import override

from ...training.arguments import check_integer, require

REGULARIZATION = 0.01  # so that logistic regression has a minimum
_DECREMENT = 1e-16  # of Newton's method: twice what f is above its minimum


class Shards(ABC):
    """The functions f_i of n ranks, whose mean is f."""

    @abstractmethod
    def draw(self, step: int) -> np.ndarray:
        """Return what is random in the gradients of a step, (n, ...)."""

    @abstractmethod
    def gradients(self, points: np.ndarray, drawn: np.ndarray, ranks: slice) -> np.ndarray:
        """Return the gradients of m ranks, (m, d), at their points, (m, d).

        Args:
            drawn: (m, ...) rows of these ranks.
        """

    @abstractmethod
    def loss(self, point: np.ndarray) -> float:
        """Return f at a point, (d,), minus its minimum."""


@dataclass(frozen=True)
class Objective(ABC):
    """What ranks train by plain SGD, from zeros.

    Args:
        learning_rate: of SGD.
        dimension: d, of the parameters.
        heterogeneity: how far the ranks' shards differ; 0: all are the same.
    """

    learning_rate: float
    dimension: int = 10
    heterogeneity: float = 1.0

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "learning_rate must be positive", self.learning_rate)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is float:
                require(
                    0 <= value < math.inf, f"{field.name} must be finite and not negative", value
                )
            elif value is not None or field.type is int:
                check_integer(field.name, value)

    @abstractmethod
    def divide(self, num_ranks: int, seed: int) -> Shards:
        """Return the ranks' functions, drawn at random."""


@dataclass(frozen=True)
class Quadratic(Objective):
    """``f_i(x) = sum_j a_ij (x_j - b_ij)^2 / 2``, after Koloskova et al. (arXiv 2003.10422).

    Curvatures are at most 1: those of entry j are from 1 to 1/10, in equal ratios, each divided by
    a factor between 1 and 1 + heterogeneity. The minima b_ij are 1 plus normal numbers with the
    standard deviation heterogeneity. Memory: 3 n d numbers in float64.

    Args:
        noise: standard deviation of each entry of a gradient.
    """

    noise: float = 0.1

    @override
    def divide(self, num_ranks: int, seed: int) -> "QuadraticShards":
        return QuadraticShards(self, num_ranks, seed)


@dataclass(frozen=True)
class LogisticRegression(Objective):
    """Logistic regression on normal features, after Li et al.'s Synthetic (arXiv 1812.06127).

    ``f_i(x) = mean_s log(1 + exp(-y_s u_s' x)) + 0.01 |x|^2 / 2`` over the samples of rank i, whose
    labels y are 1 with probability sigmoid(u' v), else -1. To features u and to v, which all ranks
    share, each adds ``heterogeneity`` times normal numbers of its own, to features with a mean of
    its own. The minimum of f is found by Newton's method. Memory: 4 n samples d numbers in float64
    at the start, then 1, and 2 n batch d in a step.

    Args:
        batch: samples of each gradient, drawn from the rank's shard with replacement; None: all.
        samples: of a shard.
    """

    batch: int | None = 8
    samples: int = 32

    @override
    def divide(self, num_ranks: int, seed: int) -> "LogisticShards":
        return LogisticShards(self, num_ranks, seed)


class QuadraticShards(Shards):
    """The ranks' quadratics.

    Attributes:
        curvatures: (n, d) a.
        minima: (n, d) b.
        minimum: (d,) of f.
    """

    def __init__(self, options: Quadratic, num_ranks: int, seed: int) -> None:
        self._noise, self._seed = options.noise, seed
        random, shape = _random(seed, 0), (num_ranks, options.dimension)
        apart = options.heterogeneity
        self.curvatures = np.geomspace(1, 0.1, options.dimension) / (
            1 + apart * random.random(shape)
        )
        self.minima = 1 + apart * random.standard_normal(shape)
        self._curvature = self.curvatures.mean(0)
        self.minimum = (self.curvatures * self.minima).mean(0) / self._curvature

    @override
    def draw(self, step: int) -> np.ndarray:
        if not self._noise:
            return np.zeros((len(self.minima), 1))
        return self._noise * _random(self._seed, step + 1).standard_normal(self.minima.shape)

    @override
    def gradients(self, points: np.ndarray, drawn: np.ndarray, ranks: slice) -> np.ndarray:
        found: np.ndarray = self.curvatures[ranks] * (points - self.minima[ranks]) + drawn
        return found

    @override
    def loss(self, point: np.ndarray) -> float:
        return float(self._curvature @ (point - self.minimum) ** 2 / 2)


class LogisticShards(Shards):
    """The ranks' samples.

    Attributes:
        signed: (n, samples, d) features times labels.
        minimum: (d,) of f.
    """

    def __init__(self, options: LogisticRegression, num_ranks: int, seed: int) -> None:
        self._options, self._seed = options, seed
        n, d, random = num_ranks, options.dimension, _random(seed, 0)
        apart = options.heterogeneity
        own = random.standard_normal((n, options.samples, d)) + random.standard_normal((n, 1, d))
        features = random.standard_normal((options.samples, d)) + apart * own
        features /= math.sqrt(1 + 2 * apart**2)  # of variance 1
        labelling = random.standard_normal(d) + apart * random.standard_normal((n, d))
        shares = _sigmoid((features @ labelling[:, :, None])[:, :, 0])
        labels = np.where(random.random(options.samples) < shares, 1, -1)
        self.signed = features * labels[:, :, None]
        self.minimum = self._minimize()
        self._least = self._value(self.minimum)

    @override
    def draw(self, step: int) -> np.ndarray:
        n, samples, _ = self.signed.shape
        if self._options.batch is None:
            return np.broadcast_to(np.arange(samples), (n, samples))
        return _random(self._seed, step + 1).integers(samples, size=(n, self._options.batch))

    @override
    def gradients(self, points: np.ndarray, drawn: np.ndarray, ranks: slice) -> np.ndarray:
        batches = np.take_along_axis(self.signed[ranks], drawn[:, :, None], 1)
        shares = _sigmoid(-(batches @ points[:, :, None]))
        found: np.ndarray = REGULARIZATION * points - (shares * batches).mean(1)
        return found

    @override
    def loss(self, point: np.ndarray) -> float:
        return self._value(point) - self._least

    def _value(self, point: np.ndarray) -> float:
        losses = np.logaddexp(0, -(self.signed @ point))
        return float(losses.mean() + REGULARIZATION * point @ point / 2)

    def _minimize(self) -> np.ndarray:
        """Return the minimum of f, by Newton's method with steps halved until f falls."""
        d, decrement, steps = self.signed.shape[2], math.inf, 0
        point, rows = np.zeros(d), self.signed.reshape(-1, d)
        while decrement > _DECREMENT:
            require(steps < 100, "Newton's method must end in 100 steps", decrement)
            shares = _sigmoid(-(rows @ point))
            gradient = REGULARIZATION * point - shares @ rows / len(rows)
            curvature = rows.T @ (rows * (shares * (1 - shares))[:, None]) / len(rows)
            change = np.linalg.solve(curvature + REGULARIZATION * np.eye(d), gradient)
            decrement, value, steps = float(gradient @ change), self._value(point), steps + 1
            while self._value(point - change) > value + 1e-12:  # of rounding
                change /= 2
            point = point - change
        return point


def _random(seed: int, number: int) -> np.random.Generator:
    """Return a generator that shares no numbers with the clock's and the stragglers'."""
    return np.random.default_rng([seed, number, 1])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    found: np.ndarray = (1 + np.tanh(x / 2)) / 2  # without overflow
    return found
