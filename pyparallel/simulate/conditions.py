"""What slows ranks and ends them: stragglers and failures."""

import math
from dataclasses import dataclass, field

import numpy as np

from ..training.arguments import require


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
        require(0 <= self.sigma < math.inf, "lognormal must be at least 0", self.sigma)
        for rank, factor in self.slow.items():
            require(0 < factor < math.inf, f"slow:{rank} must be greater than 0", factor)

    @classmethod
    def parse(cls, text: str) -> "Stragglers":
        """Read ``lognormal:0.1``, ``slow:0=3.0`` or several of them with commas between."""
        sigma, slow = 0.0, {}
        for part in filter(None, text.split(",")):
            kind, _, value = part.strip().partition(":")
            rank, _, factor = value.partition("=")
            try:
                if kind == "lognormal":
                    sigma = float(value)
                elif kind == "slow":
                    slow[int(rank)] = float(factor)
                else:
                    raise ValueError
            except ValueError:
                rule = "stragglers must be such as lognormal:0.1 or slow:0=3.0"
                raise ValueError(f"{rule}, got {part!r}") from None
        return cls(sigma, slow)

    def check_ranks(self, num_ranks: int) -> None:
        """Raise a ValueError for a slow rank that there is not."""
        rule = f"slow ranks must be from 0 to {num_ranks - 1}"
        wrong = [rank for rank in self.slow if not 0 <= rank < num_ranks]
        require(not wrong, rule, str(wrong))

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

    Goodput is the share of all ranks' time that is spent on steps that count. Failures hit what
    runs, one machine each time, at any moment with the same probability:

    - ranks that average over all: everything stops for ``restart``, and what was computed since
      the last checkpoint, half of ``checkpoint`` on average, is lost;
    - gossip: the machine's ranks stop for ``restart`` and join again with a neighbor's weights; all
      others wait for ``detect``;
    - ``learners``, of equal size and each all-reducing inside: one of them stops for ``restart``.

    Args:
        mtbf: mean time between failures anywhere in the run.
        learners: into which outer steps divide the ranks; 0: not into learners.
    """

    mtbf: float
    restart: float = 300.0
    checkpoint: float = 600.0
    detect: float = 2.0
    learners: int = 0

    def __post_init__(self) -> None:
        require(0 < self.mtbf < math.inf, "mtbf must be greater than 0 and finite", self.mtbf)
        for name in ("restart", "checkpoint", "detect", "learners"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"{name} must be finite and not negative", value)

    @classmethod
    def parse(cls, text: str) -> "Failures":
        """Read ``mtbf=3600,restart=120``: the arguments, with commas between."""
        given: dict[str, float] = {}
        names = list(cls.__dataclass_fields__)
        for part in text.split(","):
            name, _, value = (each.strip() for each in part.partition("="))
            try:
                given[name] = int(value) if name == "learners" else float(value)
            except ValueError:
                raise ValueError(f"failures must be such as mtbf=3600, got {part!r}") from None
            require(name in names, f"failures must be of {', '.join(names)}", name)
        require("mtbf" in given, "failures must have mtbf", text)
        return cls(**given)  # type: ignore[arg-type]  # learners is an int

    def goodput(self, num_machines: int, *, by_gossip: bool, has_learners: bool) -> float:
        """Return the share of time that counts."""
        if by_gossip:
            return _running(self.mtbf * num_machines, self.restart) * _running(
                self.mtbf, self.detect
            )
        if has_learners and self.learners:
            return _running(self.mtbf * self.learners, self.restart)
        return _running(self.mtbf, self.restart + self.checkpoint / 2)


def _running(mtbf: float, down: float) -> float:
    """Return the share of time that something runs which fails only while it does."""
    return mtbf / (mtbf + down)
