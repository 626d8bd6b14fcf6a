"""Adapters for other trainers: each module imports its host, and nothing else does.

``pyparallel.integrations.lightning``, ``.accelerate`` and ``.transformers``.
"""

from . import versions

__all__ = ["versions"]
