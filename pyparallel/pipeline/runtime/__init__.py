"""Running a schedule on one rank: stages, weight versions, messages and the executor."""

from .executor import Span, StageError
from .stage_layers import Skippable

__all__ = [
    "Skippable",
    "Span",
    "StageError",
]
