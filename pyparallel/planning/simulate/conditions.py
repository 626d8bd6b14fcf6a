"""What slows ranks and ends them: stragglers and failures."""

import math
from dataclasses import dataclass, field, fields

import numpy as np

from ...training.arguments import require


@dataclass(frozen=True)
class Stragglers:
    """How the seconds that ranks compute vary.

    Args:
        sigma: each rank's computing in each step is multiplied by ``exp(sigma * x)``, where x is
            normally distributed.
        slow: how many times as long a rank computes in all steps, by rank.
    """

    sigma: float = 0.0
    slow: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, factor in [("lognormal", self.sigma), *self.slow.items()]:
            rule = f"{name} of stragglers must be finite and not negative"
            require(0 <= factor < math.inf, rule, factor)

    @classmethod
    def parse(cls, text: str) -> "Stragglers":
        """Read ``lognormal:0.1``, ``slow:0=3.0`` or several of them with commas between."""
        sigma, slow = 0.0, {}
        for part in filter(None, text.split(",")):
            kind, _, value = part.strip().partition(":")
            try:
                if kind == "slow":
                    rank, factor = value.split("=")
                    slow[int(rank)] = float(factor)
                else:
                    sigma = float(value if kind == "lognormal" else "no number")
            except ValueError:
                rule = "stragglers must be such as lognormal:0.1 or slow:0=3.0"
                raise ValueError(f"{rule}, got {part!r}") from None
        return cls(sigma, slow)

    def check_ranks(self, num_ranks: int) -> None:
        """Raise a ValueError if a slow rank is none of so many."""
        wrong = [rank for rank in self.slow if not 0 <= rank < num_ranks]
        require(not wrong, f"slow ranks must be from 0 to {num_ranks - 1}", str(wrong))

    def draw(self, computing: np.ndarray, seed: int, step: int) -> np.ndarray:
        """Return the seconds for which each rank computes in a step, (n,)."""
        if not self.sigma:
            return computing
        normal = np.random.default_rng([seed, step]).standard_normal(len(computing))
        drawn: np.ndarray = computing * np.exp(self.sigma * normal)
        return drawn


@dataclass(frozen=True)
class Failures:
    """How often something fails, and what it costs; all in seconds.

    Goodput is the share of all ranks' time that is spent on steps that count. A failure ends one
    machine, at any moment with the same probability, but nothing fails while it stands still:

    - If ranks average over all, all stop for ``restart``, and what was computed since the last
      checkpoint, half of ``checkpoint`` on average, is lost.
    - In gossip the machine's ranks stop for ``restart`` and join again with a neighbor's weights;
      all others wait for ``detect``.
    - Of ``learners`` of equal size, which all-reduce inside, one stops for ``restart``.

    Args:
        mtbf: mean time between failures anywhere in the run.
        learners: into which outer steps divide the ranks; 0: outer steps average over all.
    """

    mtbf: float
    restart: float = 300.0
    checkpoint: float = 600.0
    detect: float = 2.0
    learners: float = 0

    def __post_init__(self) -> None:
        require(self.mtbf > 0, "mtbf must be greater than 0", self.mtbf)
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"{name} must be finite and not negative", value)

    @classmethod
    def parse(cls, text: str) -> "Failures":
        """Read ``mtbf=3600,restart=120``: the arguments, with commas between."""
        names = [each.name for each in fields(cls)]
        try:
            pairs = [part.split("=") for part in text.split(",")]
            given = {name.strip(): float(value) for name, value in pairs}
        except ValueError:
            raise ValueError(f"failures must be such as mtbf=3600, got {text}") from None
        fits = "mtbf" in given and given.keys() <= set(names)
        require(fits, f"failures must be of {', '.join(names)}, and the first of them", text)
        return cls(**given)

    def goodput(self, num_machines: int, *, by_gossip: bool, has_learners: bool) -> float:
        """Return the share of time that counts."""
        if by_gossip:
            machines = self._running(num_machines, self.restart)
            return machines * self._running(1, self.detect)
        if has_learners and self.learners:
            return self._running(self.learners, self.restart)
        return self._running(1, self.restart + self.checkpoint / 2)

    def _running(self, parts: float, down: float) -> float:
        """Return the share of time that one of so many equal parts of the run is not down."""
        return self.mtbf * parts / (self.mtbf * parts + down)
