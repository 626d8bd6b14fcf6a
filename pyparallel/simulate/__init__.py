"""Simulated training runs: seconds a step, waits, consensus and goodput on any number of ranks."""

from .conditions import Failures, Stragglers
from .constructors import parse_algorithm
from .cost import Cost, SingleRankCollectives
from .links import Links, Uplink
from .model import SimulatedRun, simulate_run
from .profile import Profile

__all__ = [
    "Cost",
    "Failures",
    "Links",
    "Profile",
    "SimulatedRun",
    "SingleRankCollectives",
    "Stragglers",
    "Uplink",
    "parse_algorithm",
    "simulate_run",
]
