"""The refusal of steps that a trainer would not see."""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .step_hook import StepHook, StepHooks, name_optimizers


def _optimizers_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that one holds as attributes, also in lists, as a wrapper does."""
    values = vars(optimizer).values()
    several = [value if isinstance(value, list | tuple) else [value] for value in values]
    return [each for value in several for each in value if isinstance(each, Optimizer)]


@dataclass(eq=False)
class _Check:
    """Check the steps of all optimizers until it is closed or the trainer is gone."""

    trainer: "weakref.ref[object]"
    check: Callable[[Optimizer, Any, Any], None]
    is_closed: bool = False

    @property
    def applies(self) -> bool:
        return not self.is_closed and self.trainer() is not None

    def close(self) -> None:
        self.is_closed = True


class _Checks:
    """One hook of torch for the checks of all trainers, registered once and never removed.

    Torch iterates over its dict of hooks in each step, where a trainer that is garbage collected,
    or closed by another thread, must not change that dict.
    """

    def __init__(self) -> None:
        self._all: tuple[_Check, ...] = ()  # replaced, never changed
        self._lock = threading.RLock()
        self._handle: Any = None

    def add(self, check: _Check) -> None:
        with self._lock:
            self._all = (*(each for each in self._all if each.applies), check)
            if self._handle is None:
                self._handle = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for each in self._all:
            if each.applies:
                each.check(optimizer, args, kwargs)


_checks = _Checks()


def refuse_other_optimizers(
    trainer: object,
    parameters: Iterable[Tensor],
    optimizers: Optimizer | Sequence[Optimizer],
    step_hook: StepHook | StepHooks,
    synchronizes: Callable[[], bool] | None = None,
) -> Callable[[], None]:
    """Raise a RuntimeError when another optimizer is about to step a trainer's parameters.

    Another one is any torch optimizer that holds none of the trainer's, as a wrapper does. It is
    about to step a parameter that has a gradient, or may get one from a closure. What the trainer's
    own optimizer steps inside its step is that one's. Only weak references are kept.

    Args:
        trainer: named in the error.
        parameters: those that the trainer keeps together.
        optimizers: the trainer's, one or more, which may be gone by then.
        step_hook: steps that begin inside its own are not refused.
        synchronizes: a method of the trainer that returns False where steps are local.

    Returns:
        What ends the check when it is called; it also ends when the trainer is gone.
    """
    several = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    own, hook = weakref.WeakSet(several), weakref.ref(step_hook)
    own_name = " and ".join(name_optimizers(several))
    what = "the one" if len(several) == 1 else "those"
    trainer_name = type(trainer).__name__
    method = synchronizes and weakref.WeakMethod(synchronizes)
    identities = frozenset(map(id, parameters))
    shared_of: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[Tensor]]]
    shared_of = weakref.WeakKeyDictionary()

    def applies() -> bool:
        own_hook, bound = hook(), method and method()
        return not (own_hook and own_hook.in_step) and bool(bound is None or bound())

    def check(other: Optimizer, args: Any, kwargs: Any) -> None:
        if other in own:
            return
        size = sum(len(group["params"]) for group in other.param_groups)
        known = shared_of.get(other)
        if known is None or known[0] != size:
            parameters = [p for group in other.param_groups for p in group["params"]]
            shared = (
                []
                if any(each in own for each in _optimizers_of(other))
                else [p for p in parameters if id(p) in identities]
            )
            known = shared_of[other] = size, shared
        has_closure = kwargs.get("closure", args[1] if len(args) > 1 else None) is not None
        steps = has_closure or any(p.grad is not None for p in known[1])
        if known[1] and steps and applies():
            raise RuntimeError(
                f"the parameters of a {trainer_name} must be stepped by the {own_name} that it was "
                f"given, got a step of another optimizer, {type(other).__name__}, after which no "
                f"round would be taken; nothing has been stepped: step {what} it was given, or "
                "close() the trainer and wrap again with this one"
            )

    added = _Check(weakref.ref(trainer), check)
    _checks.add(added)
    return added.close
