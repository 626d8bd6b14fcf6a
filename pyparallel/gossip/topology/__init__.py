"""Who sends to whom at which round, and which share: policy that knows no process group.

Every topology takes the number of ranks first and serves any number of them, one included, or says
which the nearest valid numbers are. ``FromGraph`` and ``FromMatrix`` take a graph of one's own.
"""

from .base import Circulant, Neighbors, Topology, round_share, uniform_share
from .circulant import Complete, DirectedExponential, DirectedLinear, OnePeerExponential, Ring
from .composed import Hierarchical, Lazy, TimeVarying
from .explicit import Explicit, FromGraph, FromMatrix
from .finite_time import BaseGraph
from .mixing import mixing_curve, spectral_gap
from .pairs import BipartiteExponential, Hypercube, Matching, RandomMatching
from .phases import Phases
from .static import Star, Torus

__all__ = [
    "BaseGraph",
    "BipartiteExponential",
    "Circulant",
    "Complete",
    "DirectedExponential",
    "DirectedLinear",
    "Explicit",
    "FromGraph",
    "FromMatrix",
    "Hierarchical",
    "Hypercube",
    "Lazy",
    "Matching",
    "Neighbors",
    "OnePeerExponential",
    "Phases",
    "RandomMatching",
    "Ring",
    "Star",
    "TimeVarying",
    "Topology",
    "Torus",
    "mixing_curve",
    "round_share",
    "spectral_gap",
    "uniform_share",
]
