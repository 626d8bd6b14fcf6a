"""Sequences that are cut over ranks: ring attention."""

from .attention import ring_attention, zigzag_split

__all__ = ["ring_attention", "zigzag_split"]
