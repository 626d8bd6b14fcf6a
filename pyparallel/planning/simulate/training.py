"""The training of simulated ranks: SGD on their shards, and outer steps by an algorithm's rule."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch

from ...gossip.algorithms.base import Periodic
from .cost import SingleRankCollectives
from .objectives import Objective

_CACHED_STEPS = 24  # of ranks that are not in the same one
_ALL = slice(None)


class Training:
    """Plain SGD of all ranks, each with the gradients of its own shard.

    Args:
        values: (n, d + 1), a view of what an algorithm mixes: x, zeros at first, and the push-sum
            weights w.
        is_biased: gradients are taken at x, instead of z = x / w.

    Attributes:
        x: (n, d), a view of the values.
        weights: (n, 1) w, a view of the values; ones if biased.
    """

    def __init__(
        self, objective: Objective, values: np.ndarray, seed: int, *, is_biased: bool
    ) -> None:
        self.learning_rate, self.x = objective.learning_rate, values[:, :-1]
        self.weights = np.ones((len(values), 1)) if is_biased else values[:, -1:]
        self._shards = objective.divide(len(values), seed)
        self._draw = lru_cache(_CACHED_STEPS)(self._shards.draw)
        self._gradients = np.zeros_like(self.x)

    @property
    def z(self) -> np.ndarray:
        """Each rank's parameters, (n, d), at which it takes gradients."""
        found: np.ndarray = self.x / self.weights
        return found

    def compute(self, step: int) -> None:
        """Compute all ranks' gradients."""
        self._gradients = self._shards.gradients(self.z, self._shards.draw(step), _ALL)

    def compute_alone(self, rank: int, step: int) -> None:
        """Compute the gradient of a rank in a step of its own, where push-sum weights are 1."""
        row = slice(rank, rank + 1)
        self._gradients[row] = self._shards.gradients(self.x[row], self._draw(step)[row], row)

    def update(self, ranks: slice | int = _ALL) -> None:
        """Step along the gradients computed last: ``x <- x - learning_rate * gradient``."""
        self.x[ranks] -= self.learning_rate * self._gradients[ranks]

    def loss(self, x: np.ndarray) -> float:
        """Return f at the mean over ranks of x / w, minus its minimum, for x, (n, d)."""
        z = x / self.weights
        return self._shards.loss(z.mean(0))


class OuterSteps:
    """Outer steps of one fragment of x on all ranks, by the rule that the algorithm's ranks take.

    A fragment has every so many-th entry of x. Where all ranks have the same average, one of them
    takes the outer step for all.
    """

    def __init__(self, algorithm: Periodic, training: Training, number: int) -> None:
        self._training, self._x = training, training.x[:, number :: algorithm.num_fragments]
        self._taken_by: slice | int = 0 if algorithm.averages_over_all else _ALL
        weights = [torch.from_numpy(self._x[self._taken_by].copy())]
        unused = torch.zeros(1, device="cpu")  # the training itself is numpy's
        # Kept here: a rule has a weak reference to it, and reads its learning rate.
        self._optimizer = torch.optim.SGD([unused], lr=training.learning_rate)
        self._rule = algorithm.make_rule(weights, self._optimizer, SingleRankCollectives(1))

    @property
    def columns(self) -> slice:
        """The columns of a fragment's values that x has: the last."""
        return slice(-self._x.shape[1], None)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Hold what the rule sends in place of x."""
        held = self._x.copy()
        self._x[:] = self._rule.message([torch.from_numpy(held)])[0].numpy()
        yield
        self._x[:] = held

    @torch.no_grad()
    def step(self, averages: np.ndarray) -> np.ndarray:
        """Return the x from which ranks go on, (n, c), for averages, (n, c)."""
        (found,) = self._rule.step([torch.from_numpy(averages[self._taken_by])])
        stepped: np.ndarray = found.numpy() * self._training.weights
        return stepped
