"""``python -m pyparallel recommend``: which compressor, if any, makes steps shorter on a link."""

from .candidates import CANDIDATES, DENSE, HALF, Candidate

__all__ = ["CANDIDATES", "DENSE", "HALF", "Candidate"]
