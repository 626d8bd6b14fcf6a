"""The commands of ``python -m pyparallel``."""

from .doctor import examine

__all__ = [
    "examine",
]
