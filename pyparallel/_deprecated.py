"""Old public names, kept for one release: each works, and warns once with the new name."""

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)

# The old names of each public module, and what they are called now. "a.b" lies in the submodule a.
MODULE_NAMES: dict[str, dict[str, str]] = {
    "pyparallel.compression": {
        "Layout": "BufferLayout",
        "Memory": "StateStore",
        "Meter": "CommStats",
        "Ranks": "Collectives",
        "State": "CompressorState",
    },
    "pyparallel.pipeline": {
        "Displaces": "PredictsStep",
        "Foresight": "WeightPredictor",
        "Kept": "Stashed",
        "Layout": "PipelineShape",
        "Moments": "VersionCounters",
        "Reading": "WeightVersion",
        "Reconstructed": "Recomputed",
        "Unpredicted": "NoPrediction",
        "measure_costs": "costs_from_timeline",
        "record": "timeline_from_trace",
    },
    "pyparallel.subnets": {"Width": "CutDim"},
}


def warn(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that an old name was used, and name the new one.

    Args:
        old: as the user wrote it.
        new: what to write instead.
        stacklevel: as of ``warnings.warn``, counted from this function.
    """
    warnings.warn(
        f"{old} is deprecated and will be removed in the next release: use {new}",
        DeprecationWarning,
        stacklevel=stacklevel,
    )


def resolve(module: str, name: str) -> Any:
    """Return what an old name of a module stands for; the body of the module's ``__getattr__``.

    Raises:
        AttributeError: the module never had such a name.
    """
    new = MODULE_NAMES.get(module, {}).get(name)
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warn(f"{module}.{name}", f"{module}.{new}", stacklevel=4)
    return getattr(sys.modules[module], new)


def renamed_attributes(**names: str) -> Callable[[Class], Class]:
    """Let instances of a class be asked for attributes and methods by their old names.

    Args:
        names: old name to new name.
    """

    def decorate(cls: Class) -> Class:
        for old, new in names.items():
            setattr(cls, old, _forward(old, new))
        return cls

    return decorate


def _forward(old: str, new: str) -> property:
    def get(self: Any) -> Any:
        warn(f"{type(self).__name__}.{old}", f"{type(self).__name__}.{new}")
        return getattr(self, new)

    return property(get)


def adopt_old_methods(cls: type, names: Mapping[str, str]) -> None:
    """Let a user's class that defines methods by their old names have them by the new ones.

    Args:
        cls: changed in place; what it defines by the new name stays.
        names: old name to new name.
    """
    for old, new in names.items():
        method = vars(cls).get(old)
        if method is not None and new not in vars(cls):
            warn(f"{cls.__name__}.{old}", f"{cls.__name__}.{new}", stacklevel=4)
            setattr(cls, new, method)
