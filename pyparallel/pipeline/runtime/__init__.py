"""What runs a schedule on one rank: stages, weight versions, messages, the executor."""

from .executor import Span, StageError

__all__ = [
    "Span",
    "StageError",
]
