"""The durations of actions, messages and rounds, by stage."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from ...training.arguments import require


@dataclass(frozen=True)
class Costs:
    """Durations in any one unit, each one number for all stages or one number per stage.

    ``communication`` of stage s is the latency of a message between s and s + 1 in either
    direction, during which ranks are free; messages between stages on one rank take no time.
    ``round`` is that of a stage's round with other replicas, as of ``SGP(overlap=1)``: it begins
    after an update, and the stage's next update waits for it; not in ``simulate_interlocking``.
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 2.0
    backward_input: float | Sequence[float] = 1.0
    backward_weight: float | Sequence[float] = 1.0
    update: float | Sequence[float] = 0.0
    head: float | Sequence[float] = 0.0
    learn: float | Sequence[float] = 2.0
    communication: float | Sequence[float] = 0.0
    round: float | Sequence[float] = 0.0

    def durations(self, num_stages: int) -> np.ndarray:
        """Return the durations as (kinds, num_stages) float64, in the order of ``Kind``."""
        names = [field.name for field in fields(self)][:-2]
        return np.stack([self._by_stage(name, num_stages) for name in names])

    def latencies(self, num_stages: int) -> np.ndarray:
        """Return that between each stage and the next, and of rounds: (2, num_stages) float64."""
        return np.stack([self._by_stage(name, num_stages) for name in ("communication", "round")])

    def _by_stage(self, name: str, num_stages: int) -> np.ndarray:
        value = getattr(self, name)
        given = np.asarray(value, dtype=np.float64)
        fits = given.ndim == 0 or given.shape == (num_stages,)
        rule = f"{name} must be one number or one for each of {num_stages} stages"
        require(fits, rule, repr(value))
        are_valid = np.isfinite(given).all() and (given >= 0).all()
        require(are_valid, f"{name} must be finite and not negative", repr(value))
        return np.ascontiguousarray(np.broadcast_to(given, (num_stages,)))
