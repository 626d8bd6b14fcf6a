"""Gossip, pipelines, subnetworks and gradient compression on PyTorch, with fused kernels."""

import importlib
from typing import TYPE_CHECKING, Any

import torch

if torch.__version__ < (2, 11):  # type: ignore[operator]  # a TorchVersion
    raise ImportError(
        f"pyparallel needs torch 2.11 or newer, got {torch.__version__}; pip install 'torch>=2.11'"
    )

# The ops register with torch; comm must be imported before a process group exists, and says why.
from . import comm as comm
from . import ops

if TYPE_CHECKING:
    from . import compression, gossip, optim, pipeline, sequence, subnets
    from .gossip import SGP, GossipDataParallel, topology
    from .pipeline import PipelineTrainer
    from .subnets import SubnetTrainer

__version__ = "0.2.0.dev0"

__all__ = [
    "SGP",
    "GossipDataParallel",
    "PipelineTrainer",
    "SubnetTrainer",
    "compression",
    "gossip",
    "ops",
    "optim",
    "pipeline",
    "sequence",
    "subnets",
    "topology",
]

# The trainers do not need each other: each package is imported when it is used.
_PACKAGES = {"compression", "gossip", "optim", "pipeline", "sequence", "subnets"}
_PACKAGE_OF = {
    "SGP": "gossip",
    "GossipDataParallel": "gossip",
    "topology": "gossip",
    "PipelineTrainer": "pipeline",
    "SubnetTrainer": "subnets",
}


def __getattr__(name: str) -> Any:
    """Import a package of pyparallel, or the package that has the name."""
    if name in _PACKAGES:
        return importlib.import_module(f"pyparallel.{name}")
    if name in _PACKAGE_OF:
        return getattr(importlib.import_module(f"pyparallel.{_PACKAGE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return sorted({*globals(), *__all__})
