"""Simulated runs on any number of ranks: seconds a step, waits, goodput, consensus and losses."""

from .conditions import Failures, Stragglers
from .constructors import parse_algorithm, parse_schedule
from .cost import Cost, SingleRankCollectives
from .links import Links, Uplink
from .model import SimulatedRun, simulate_run
from .objectives import LogisticRegression, Quadratic
from .pipelines import Pipeline
from .profile import Profile

__all__ = [
    "Cost",
    "Failures",
    "Links",
    "LogisticRegression",
    "Pipeline",
    "Profile",
    "Quadratic",
    "SimulatedRun",
    "SingleRankCollectives",
    "Stragglers",
    "Uplink",
    "parse_algorithm",
    "parse_schedule",
    "simulate_run",
]
