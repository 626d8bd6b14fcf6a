"""Old public names, kept for one release: each still works, with a warning that names the new one.

``install`` adds them to a public module when that is imported. To retire them, delete this file and
the calls of its functions.
"""

import functools
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

# Of public modules: old name to new name.
_MODULES = {
    "pyparallel.compression": {
        "Layout": "BufferLayout",
        "Memory": "StateStore",
        "Meter": "CommStats",
        "Ranks": "Collectives",
        "State": "CompressorState",
    },
    "pyparallel.gossip": {"Session": "ModelAverager"},
    "pyparallel.gossip.topology": {"Hierarchical": "HierarchicalTopology"},
    "pyparallel.ops": {"server": "implementation"},
    "pyparallel.pipeline": {
        "Displaces": "PredictsStep",
        "Foresight": "WeightPredictor",
        "Kept": "Stashed",
        "Layout": "PipelineShape",
        "Moments": "VersionCounters",
        "Reading": "WeightVersion",
        "Reconstructed": "Estimated",
        "Unpredicted": "NoPrediction",
        "measure_costs": "costs_from_timeline",
        "record": "timeline_from_trace",
    },
    "pyparallel.subnets": {"Chain": "SequentialChain", "Width": "CutDim"},
}

# Methods of public classes, also of those that users write: by the module of the class.
_METHODS = {
    "pyparallel.compression": {"problem": "validation_error"},
    "pyparallel.gossip": {"facts": "config_fields", "problem": "validation_error"},
    "pyparallel.gossip.topology": {"problem": "validation_error"},
    "pyparallel.pipeline": {
        "call": "step",
        "foresight": "weight_predictor",
        "problem": "validation_error",
    },
    "pyparallel.subnets": {
        "problem": "validation_error",
        "renew": "on_new_round",
        "travelling": "carried_state",
        "widths": "cut_dims",
    },
}
# The base classes whose subclasses are adopted when they are defined; see adopt_old_methods, too.
_BASES = {
    "pyparallel.compression": "Compressor",
    "pyparallel.gossip.topology": "Topology",
    "pyparallel.pipeline": "Schedule",
}

# Attributes and methods of single classes.
_MEMBERS = {
    "pyparallel.compression": {
        "Collectives": {"meter": "stats"},
        "CompressorState": {
            "by_name": "parameter_state",
            "of_all": "common_state",
            "take": "load_state",
        },
        "HeterogeneousPermK": {"among": "for_num_ranks", "weigh_": "precondition_"},
        "PermK": {"among": "for_num_ranks", "weigh_": "precondition_"},
        "ScaledPermK": {"among": "for_num_ranks", "weigh_": "precondition_"},
    },
    "pyparallel.gossip": {
        "GossipDataParallel": {"facts": "config_fields", "weight": "push_sum_weight"},
    },
    "pyparallel.ops": {"Backend": {"problem": "unavailable_reason"}},
    "pyparallel.pipeline": {
        "Timeline": {"call_starts": "step_starts"},
        "VersionCounters": {"leader": "first_forward"},
    },
    "pyparallel.subnets": {"SubnetTrainer": {"assembled": "full_model"}},
}

# What was public and is now outside of the package, with its new place in the repository.
_MOVED = {
    "pyparallel.compression": {
        "Compressor.contraction": "benchmarks.theory.contraction.contraction(compressor, layout)",
    },
    "pyparallel.subnets": {
        name: f"benchmarks.theory.quadratic.{name}"
        for name in ["Quadratic", "drawn_sketches", "every_order", "permutation_sketches"]
    },
}

# Saved states hold the reprs of what they were saved with; these have changed since.
_SAVED_REPRS: dict[str, str] = {
    r"\bHierarchical\((?=\d)": "HierarchicalTopology(",
    r"\bChain\(\)": "SequentialChain()",
    r"\b_orig_mod\.": "",  # of a module that was compiled
}


def install(module: str) -> None:
    """Add the old names of a public module and of its classes; called at the end of its import.

    Args:
        module: the module's name.
    """
    namespace, methods = vars(sys.modules[module]), _METHODS.get(module, {})
    _add_to_module(module, _MODULES.get(module, {}))
    for name in _MOVED.get(module, {}):
        cls, _, member = name.rpartition(".")
        if cls:
            setattr(namespace[cls], member, _Moved(module, name))
    for name, members in _MEMBERS.get(module, {}).items():
        _add_to_class(namespace[name], members)
    if module in _BASES:
        _adopt_in_subclasses(namespace[_BASES[module]], methods)
    for exported in map(namespace.get, namespace["__all__"]):
        if isinstance(exported, type):
            own = {old: new for old, new in methods.items() if new in vars(exported)}
            _add_to_class(exported, own)


def adopt_old_methods(module: str, user_object: object) -> None:
    """Let an object's class, if a user has written it, have its methods by their new names.

    Args:
        module: the public module whose protocol the class satisfies.
        user_object: its class is changed; what the class defines by a new name stays.
    """
    for cls in type(user_object).__mro__:
        if cls.__module__.partition(".")[0] == "pyparallel":
            return
        _adopt(cls, _METHODS[module])


def _adopt(cls: type, names: Mapping[str, str]) -> None:
    for old, new in names.items():
        if old in vars(cls) and new not in vars(cls):
            _warn(f"{cls.__name__}.{old}", f"{cls.__name__}.{new}")
            setattr(cls, new, vars(cls)[old])


def renamed_arguments(**names: str) -> Callable[[Function], Function]:
    """Let a function be called with the old names of keyword arguments.

    Args:
        names: old name to new name.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old in names.keys() & kwargs.keys():
                _warn(f"{function.__name__}({old}=...)", f"{names[old]}=...")
                kwargs[names[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        return cast(Function, call)

    return decorate


def modernize_saved(fields: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the config fields of a saved state with today's class names in their values."""
    modern = []
    for name, saved in fields:
        value = saved
        for old, new in _SAVED_REPRS.items():
            value = re.sub(old, new, value)
        modern.append((name, value))
    return modern


def _warn(old: str, new: str) -> None:
    # The warning is for the first frame outside this file and the interpreter's own modules, of
    # which `warnings` does not count importlib.
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_code.co_filename.startswith((__file__, "<frozen")):
        level += not frame.f_code.co_filename.startswith("<frozen importlib")
        frame = frame.f_back
    warnings.warn(
        f"{old} is deprecated and will be removed in the next release: use {new}",
        DeprecationWarning,
        stacklevel=level,
    )


def _add_to_module(module: str, names: Mapping[str, str]) -> None:
    namespace = vars(sys.modules[module])
    otherwise = namespace.get("__getattr__")  # what the module imports only when it is used

    def resolve(name: str) -> Any:
        if name in names:
            _warn(f"{module}.{name}", f"{module}.{names[name]}")
            # Kept under the old name too: `from module import name` asks twice, and warns once.
            namespace[name] = namespace[names[name]]
            return namespace[name]
        if name in _MOVED.get(module, {}):
            # Not an AttributeError, whose text `from module import name` would discard.
            raise ImportError(_moved_text(module, name))
        if otherwise is not None:
            return otherwise(name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    namespace["__getattr__"] = resolve


def _moved_text(module: str, name: str) -> str:
    place = _MOVED[module][name]
    return f"{name} has left {module}: use {place} from pyparallel's repository"


class _Moved:
    """A member of a class that is now outside of the package."""

    def __init__(self, module: str, name: str) -> None:
        self.text = _moved_text(module, name)

    def __get__(self, instance: Any, owner: type) -> Any:
        raise AttributeError(self.text)


def _add_to_class(cls: type, names: Mapping[str, str]) -> None:
    for old, new in names.items():
        if old not in vars(cls):
            setattr(cls, old, _Renamed(old, new))


class _Renamed:
    """An attribute or a method under its old name."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def __get__(self, instance: Any, owner: type) -> Any:
        _warn(f"{owner.__name__}.{self.old}", f"{owner.__name__}.{self.new}")
        return getattr(owner if instance is None else instance, self.new)


def _adopt_in_subclasses(base: type, names: Mapping[str, str]) -> None:
    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        # mypy does not take `base` for a class.
        super(base, cls).__init_subclass__(**kwargs)  # type: ignore[arg-type]
        _adopt(cls, names)

    setattr(base, "__init_subclass__", classmethod(init_subclass))  # noqa: B010  as mypy sees it
