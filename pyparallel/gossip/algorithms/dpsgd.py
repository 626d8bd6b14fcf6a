"""Decentralized parallel SGD: SGP on symmetric topologies, where push-sum weights stay 1."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from typing_extensions import override

from ...training import Place
from ..topology import BaseGraph
from .sgp import SGP


def dpsgd(x: Tensor, update: Callable[[Tensor], Tensor], mixing: Tensor) -> Tensor:
    """Take a step of Algorithm 1 of Lian et al. on all n ranks; return x after it.

    Args:
        x: (n, d) parameters, a row for each rank.
        update: of all ranks' optimizers, (n, d), of the gradients at x: with SGD, lr * gradient.
        mixing: (n, n) W, symmetric and doubly stochastic.
    """
    change = update(x)  # line 3: the gradient at x_i
    x = mixing @ x  # line 4: x_i <- sum_j W_ij x_j, of parameters before the update
    return x - change  # line 5: x_i <- x_i - lr * grad F_i


@dataclass(frozen=True)
class DPSGD(SGP):
    """D-PSGD (Lian et al., NeurIPS 2017, arXiv 1705.09056), on symmetric topologies.

    In each step every rank updates its model and averages it with its neighbors by a symmetric,
    doubly stochastic mixing matrix P, so push-sum weights stay 1. It is SGP with a check that the
    topology is symmetric.

    ``overlap=1`` is combine-while-adapt, Algorithm 1 as Lian et al. print it: the gradient at x and
    the average of the neighbors' x, then ``x <- P x - lr * g(x)``; communication and computation
    overlap. ``overlap=0``, the default, is adapt-then-combine, ``x <- P (x - lr * g(x))``, with the
    larger stable learning rate (see ``stability_limit``).

    Args:
        topology: symmetric in every round, such as ``Ring``, ``Torus``, ``Hypercube``,
            ``BipartiteExponential``, ``RandomMatching``, ``BaseGraph`` or ``Complete``, or such a
            class; None: ``BaseGraph``.
        overlap: number of steps for which messages may be in flight, as for SGP; 0 and 1 are the
            two orders above.
    """

    default = BaseGraph

    @override
    def error_at(self, place: Place) -> str | None:
        if error_text := super().error_at(place):
            return error_text
        topology = self.bound_topology
        for index in topology.rounds:
            matrix = topology.mixing_matrix(index)
            if not np.array_equal(matrix, matrix.T):
                return (
                    "topology must be symmetric in every round for DPSGD (SGP takes any), got "
                    f"{topology!r}, where round {index} is not"
                )
        return None
