"""The refusal of steps that a trainer would not see."""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .step_hook import StepHook, StepHooks, closure_of, name_optimizers


def refuse_other_optimizers(
    trainer: object,
    parameters: Iterable[Tensor],
    optimizers: Optimizer | Sequence[Optimizer],
    step_hook: StepHook | StepHooks,
    synchronizes: Callable[[], bool] | None = None,
) -> Callable[[], None]:
    """Raise a RuntimeError when another optimizer is about to step a trainer's parameters.

    Another one holds none of the trainer's, as a wrapper does; it is about to step a parameter with
    a gradient, or with a closure. Steps inside the own optimizer's step are that one's; where
    ``synchronizes``, a method of the trainer, returns False, steps are local. Return what ends the
    check, which keeps only weak references.
    """
    check = _Check(trainer, parameters, optimizers, step_hook, synchronizes)
    check.add()
    return check.close


class _Check:
    # Those of this process; replaced, never changed. torch iterates over its dict of hooks in each
    # step, where a trainer that is garbage collected, or closed by another thread, must not change
    # it. So one hook is registered with the first check and stays.
    _all: ClassVar[tuple["_Check", ...]] = ()
    _lock = threading.RLock()
    _hook_of_all: ClassVar[Any] = None

    def __init__(
        self,
        trainer: object,
        parameters: Iterable[Tensor],
        optimizers: Optimizer | Sequence[Optimizer],
        step_hook: StepHook | StepHooks,
        synchronizes: Callable[[], bool] | None,
    ) -> None:
        several = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
        self._own, self._hook = weakref.WeakSet(several), weakref.ref(step_hook)
        self._trainer = weakref.ref(trainer)
        self._synchronizes = synchronizes and weakref.WeakMethod(synchronizes)
        self._identities = frozenset(map(id, parameters))
        self._is_closed = False
        self.text = (
            f"the parameters of a {type(trainer).__name__} must be stepped by the "
            f"{' and '.join(name_optimizers(several))} that it was given, got a step of another "
            "optimizer, {}, after which no round would be taken; nothing has been stepped: step "
            f"{'the one' if len(several) == 1 else 'those'} it was given, or close() the trainer "
            "and wrap again with this one"
        )

    def add(self) -> None:
        with _Check._lock:
            _Check._all = (*(each for each in _Check._all if each.is_open), self)
            if _Check._hook_of_all is None:
                _Check._hook_of_all = register_optimizer_step_pre_hook(_Check.before_any_step)

    @staticmethod
    def before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Raise the error of the first check that refuses a step."""
        if not torch.compiler.is_compiling():
            for check in _Check._all:
                if check.refuses(optimizer, closure_of(args, kwargs) is not None):
                    raise RuntimeError(check.text.format(type(optimizer).__name__))

    def close(self) -> None:
        self._is_closed = True

    @property
    def is_open(self) -> bool:
        return not self._is_closed and self._trainer() is not None

    def refuses(self, optimizer: Optimizer, has_closure: bool) -> bool:
        """Return whether an optimizer is another one and about to step the trainer's parameters."""
        hook = self._hook()
        is_inside = hook is not None and hook.in_step
        if not self.is_open or optimizer in self._own or is_inside:
            return False
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        shared = [p for p in parameters if id(p) in self._identities]
        steps = bool(shared) and (has_closure or any(p.grad is not None for p in shared))
        if not steps or self._is_wrapper(optimizer):
            return False
        method = None if self._synchronizes is None else self._synchronizes()
        return method is None or method()

    def _is_wrapper(self, optimizer: Optimizer) -> bool:
        for value in vars(optimizer).values():
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, Optimizer) and each in self._own:
                    return True
        return False
