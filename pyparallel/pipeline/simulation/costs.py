"""How long things take, stage by stage."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True)
class Costs:
    """Times in any one unit; each a number for all stages or one number a stage.

    A message adds latency and occupies no rank; ``communication`` of stage s is that between s and
    s + 1, either way. Stages on one rank need none.
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 2.0
    backward_input: float | Sequence[float] = 1.0
    backward_weight: float | Sequence[float] = 1.0
    update: float | Sequence[float] = 0.0
    head: float | Sequence[float] = 0.0
    learn: float | Sequence[float] = 2.0
    communication: float | Sequence[float] = 0.0

    def durations(self, num_stages: int) -> np.ndarray:
        """(kinds, num_stages) float64, the kinds in the order of ``Kind``.

        Raises:
            ValueError: a time is negative or not finite, or there is not one a stage.
        """
        names = [field.name for field in fields(self)][:-1]
        return np.stack([self._by_stage(name, num_stages) for name in names])

    def latencies(self, num_stages: int) -> np.ndarray:
        """(num_stages,) float64: of a message between each stage and the next."""
        return self._by_stage("communication", num_stages)

    def _by_stage(self, name: str, num_stages: int) -> np.ndarray:
        value = getattr(self, name)
        given = np.asarray(value, dtype=np.float64)
        if given.ndim > 1 or (given.ndim == 1 and len(given) != num_stages):
            raise ValueError(
                f"{name} must be one number or one for each of {num_stages} stages, got {value!r}"
            )
        if not (np.isfinite(given).all() and (given >= 0).all()):
            raise ValueError(f"{name} must be finite and not negative, got {value!r}")
        return np.ascontiguousarray(np.broadcast_to(given, (num_stages,)))
