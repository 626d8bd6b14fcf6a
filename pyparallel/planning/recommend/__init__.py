"""``python -m pyparallel recommend``: which compressor or algorithm, if any, shortens steps."""

from .benchmark import Measurements, benchmark, benchmark_ranks
from .candidates import CANDIDATES, DENSE, HALF, OUTER_STEPS, Candidate
from .link import measure_link
from .model import NOISE, Link, StepTime, choose, predict
from .profile import profile
from .workload import Workload

__all__ = [
    "CANDIDATES",
    "DENSE",
    "HALF",
    "NOISE",
    "OUTER_STEPS",
    "Candidate",
    "Link",
    "Measurements",
    "StepTime",
    "Workload",
    "benchmark",
    "benchmark_ranks",
    "choose",
    "measure_link",
    "predict",
    "profile",
]
