"""Sparsifiers: compressors that send some of the entries."""

from .dgc import DGC
from .perm_k import PermK
from .random_k import RandomK
from .threshold import Threshold
from .top_k import ChunkTopK, TopK

__all__ = ["DGC", "ChunkTopK", "PermK", "RandomK", "Threshold", "TopK"]
