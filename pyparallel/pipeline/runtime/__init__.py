"""Running a schedule on one rank: stages, weight versions, messages and the executor."""

from .executor import Span, StageError

__all__ = [
    "Span",
    "StageError",
]
