"""Decentralized parallel SGD: SGP where every edge goes both ways and nobody gains weight."""

from dataclasses import dataclass

import numpy as np

from .sgp import SGP


@dataclass(frozen=True)
class DPSGD(SGP):
    """D-PSGD (Lian et al., NeurIPS 2017, arXiv 1705.09056), on symmetric topologies.

    Each step every rank updates its model and averages it with its neighbors, by a symmetric
    matrix that is doubly stochastic: weights stay 1. It is SGP on such a topology, and says so if
    it is given another.

    Args:
        topology: symmetric in every round, such as ``Ring``, ``Torus``, ``Hypercube``,
            ``BipartiteExponential``, ``RandomMatching``, ``BaseGraph`` or ``Complete``.
        overlap: as for SGP.
    """

    def validation_error(self, num_ranks: int) -> str | None:
        """As for SGP; and a round that is not symmetric."""
        return super().validation_error(num_ranks) or self._asymmetry()

    def _asymmetry(self) -> str | None:
        for index in range(self.topology.period):
            matrix = self.topology.mixing_matrix(index)
            if not np.array_equal(matrix, matrix.T):
                return (
                    "topology must be symmetric in every round for DPSGD (SGP takes any), got "
                    f"{self.topology!r}, where round {index} is not"
                )
        return None
