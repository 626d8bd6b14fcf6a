"""Adapters for other trainers: each module imports its host, and nothing else does.

``pyparallel.integrations.lightning``, ``.accelerate``, ``.transformers`` and ``.ray``. The files of
``.metrics_log`` need no host.
"""

import importlib
from typing import Any

__all__ = ["accelerate", "lightning", "metrics_log", "transformers"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
