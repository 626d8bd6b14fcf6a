"""Running a schedule on one rank: stages, weight versions, messages and the executor."""

from .chrome_trace import export_chrome_trace
from .executor import StageError
from .stage_layers import Skippable
from .telemetry import Span

__all__ = ["Skippable", "Span", "StageError", "export_chrome_trace"]
