"""``python -m pyparallel recommend``: which compressor or outer steps, if any, shorten steps."""

from .benchmark import Measurements, benchmark, benchmark_ranks
from .candidates import CANDIDATES, DENSE, HALF, OUTER_STEPS, Candidate
from .link import measure_link
from .model import NOISE, Compute, Cost, Link, StepTime, choose, predict, predict_outer
from .profile import SingleRankCollectives, profile
from .workload import Workload

__all__ = [
    "CANDIDATES",
    "DENSE",
    "HALF",
    "NOISE",
    "OUTER_STEPS",
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
    "predict_outer",
    "profile",
]
