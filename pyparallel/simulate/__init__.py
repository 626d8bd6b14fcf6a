"""Simulated training runs: seconds a step, waits, consensus and goodput on any number of ranks."""

from .conditions import Failures, Stragglers
from .constructors import parse_algorithm, parse_schedule
from .links import Links, Uplink
from .model import SimulatedRun, simulate_run
from .pipelines import Pipeline
from .profile import Profile

__all__ = [
    "Failures",
    "Links",
    "Pipeline",
    "Profile",
    "SimulatedRun",
    "Stragglers",
    "Uplink",
    "parse_algorithm",
    "parse_schedule",
    "simulate_run",
]
