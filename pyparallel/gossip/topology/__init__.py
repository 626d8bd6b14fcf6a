"""Communication topologies: the neighbors of each rank in each round and their shares of the mass.

Every topology takes the number of ranks as its first argument and accepts any number from 1, or
raises an error that names the nearest valid numbers. ``FromGraph`` and ``FromMatrix`` take a custom
graph.
"""

from .base import Circulant, Neighbors, Topology, round_share, uniform_share
from .circulant import Complete, DirectedExponential, DirectedLinear, OnePeerExponential, Ring
from .composed import HierarchicalTopology, Lazy, TimeVarying
from .edges import Edges
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
    "Edges",
    "Explicit",
    "FromGraph",
    "FromMatrix",
    "HierarchicalTopology",
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
