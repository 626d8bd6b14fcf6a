"""Compressors composed of other compressors."""

from .chain import Chain
from .error_feedback import ErrorFeedback
from .per_parameter import PerParameter
from .switch import Switch

__all__ = ["Chain", "ErrorFeedback", "PerParameter", "Switch"]
