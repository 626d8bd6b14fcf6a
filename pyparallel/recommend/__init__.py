"""``python -m pyparallel recommend``: which compressor, if any, makes steps shorter on a link."""

from .benchmark import Survey, survey, survey_ranks
from .candidates import CANDIDATES, DENSE, HALF, Candidate
from .link import measure_link
from .model import NOISE, Compute, Cost, Link, Prediction, choose, predict
from .profile import Mirror, rehearse
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
    "Mirror",
    "Prediction",
    "Survey",
    "Workload",
    "choose",
    "measure_link",
    "predict",
    "rehearse",
    "survey",
    "survey_ranks",
]
