"""``python -m pyparallel recommend``: which compressor, if any, shortens steps on a link."""

from .benchmark import Measurements, benchmark, benchmark_ranks
from .candidates import CANDIDATES, DENSE, HALF, Candidate
from .link import measure_link
from .model import NOISE, Compute, Cost, Link, StepTime, choose, predict
from .profile import SingleRankCollectives, profile
from .workload import Workload

__all__ = [
    "CANDIDATES",
    "DENSE",
    "HALF",
    "NOISE",
    "Candidate",
    "Compute",
    "Cost",
    "Link",
    "Measurements",
    "SingleRankCollectives",
    "StepTime",
    "Workload",
    "benchmark",
    "benchmark_ranks",
    "choose",
    "measure_link",
    "predict",
    "profile",
]
