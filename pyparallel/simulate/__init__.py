"""Simulated runs on any number of ranks: seconds a step, waits, goodput, consensus and losses."""

from .conditions import Failures, Stragglers
from .constructors import parse_algorithm
from .cost import Cost, SingleRankCollectives
from .links import Links, Uplink
from .model import SimulatedRun, simulate_run
from .objectives import LogisticRegression, Quadratic
from .profile import Profile

__all__ = [
    "Cost",
    "Failures",
    "Links",
    "LogisticRegression",
    "Profile",
    "Quadratic",
    "SimulatedRun",
    "SingleRankCollectives",
    "Stragglers",
    "Uplink",
    "parse_algorithm",
    "simulate_run",
]
