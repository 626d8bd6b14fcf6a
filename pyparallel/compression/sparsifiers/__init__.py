"""Sparsifiers: compressors that send some of the entries."""

from .dgc import DGC
from .diagonal import Diagonal
from .perm_k import PermK
from .random_k import RandomK
from .scaled_perm_k import HeterogeneousPermK, ScaledPermK
from .threshold import Threshold
from .top_k import TopK

__all__ = [
    "DGC",
    "Diagonal",
    "HeterogeneousPermK",
    "PermK",
    "RandomK",
    "ScaledPermK",
    "Threshold",
    "TopK",
]
