"""Optimizer steps counted once each: nested and failed steps do not count."""

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.optim import ASGD, LBFGS, Adafactor, Optimizer

from ..comm.errors import concise
from .averager import JoinedOptimizers
from .checkpointing import is_creating_state

Closure = Callable[[], Any]
_version_of = attrgetter("_version")  # of a tensor: how often it was written to


class StepHook:
    """Callbacks around every optimizer step, with a closure or without.

    An optimizer whose step calls its parent's step runs the hooks of both, and a step that raises
    does not run its post hooks. Only the outermost of nested steps counts, and only if it returns.

    ``before`` is called once in a step, with whether its gradients exist: they do before it, or
    once its closure has been evaluated. But an optimizer that may evaluate it several times, as
    LBFGS, or at other parameters, as SAM, has copies of them: for all but torch's own and those of
    ``pyparallel.optim`` it is called before. If it raises, the step has not started.
    ``before_update`` is called before an update with new gradients, ``before_evaluation`` before
    each evaluation of a closure, ``after_update`` before all other post-hooks of the optimizer,
    and ``after`` after a step, in the order in which post-hooks were registered.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        after: Callable[[], None],
        before: Callable[[Optimizer, bool], None] = lambda *_: None,
        before_update: Callable[[], None] = lambda: None,
        before_evaluation: Callable[[], None] = lambda: None,
        after_update: Callable[[], None] = lambda: None,
    ) -> None:
        self._before, self._after, self._after_update = before, after, after_update
        self._before_update, self._before_evaluation = before_update, before_evaluation
        self._depth = 0
        self._num_closures = 0  # running now
        self._has_begun = False
        self._is_update_due = False  # by the last pre-hook
        self._evaluates_once = _evaluates_once(optimizer)
        self._name = type(optimizer).__name__
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._version: int | None = None  # of the parameters, at a forward since the last step
        begin = optimizer.register_step_pre_hook(self._before_step)
        self._last = optimizer.register_step_pre_hook(self._begin_update)
        first = optimizer.register_step_post_hook(self._end_update)
        post_hooks: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict
        post_hooks.move_to_end(first.id, last=False)
        end = optimizer.register_step_post_hook(self._after_step)
        self._hooks = [begin, self._last, first, end]

    def see_forward(self, *, watches: bool = False) -> None:
        """Record a forward pass: outside of a closure, no step is in progress.

        Warn where two forwards follow each other that ``watches``, without a step of the optimizer
        but with parameters that were written to, as another optimizer does. What this library
        writes, into flat buffers and ``.data``, is not counted.
        """
        version = None
        if watches:
            version = sum(map(_version_of, self._parameters))
            if self._version not in (None, version):
                warnings.warn(
                    f"parameters of the {self._name} that a trainer was given were written to "
                    "between two forwards without its step: if another optimizer has stepped "
                    "them, ranks train apart; step the one that the trainer was given, or "
                    "close() the trainer and wrap again with the other one",
                    stacklevel=3,
                )
        self._version = version
        if not self._num_closures:
            # Behind pre-hooks that were registered since, which may read the parameters.
            hooks, number = self._last.hooks_dict_ref(), self._last.id
            if hooks and number in hooks and next(reversed(hooks)) != number:
                hooks.move_to_end(number)
            self._depth = 0

    def reset(self) -> None:
        """Take the parameters of now as the optimizer's: the trainer itself has written them."""
        self._version = None

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    @concise
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if is_creating_state():
            return None
        refuse_capture()
        closure = closure_of(args, kwargs)
        if closure is not None and self._depth and not isinstance(closure, _TrackedClosure):
            self._depth = 0
            raise RuntimeError(
                "optimizer.step(closure) must not start before the previous step has returned, got "
                "an interrupted or a nested one; call it again"
            )
        if self._depth == 0:
            self._has_begun = False
            if closure is None:
                self._begin(optimizer, True)
                self._is_update_due = True
            elif not self._evaluates_once:
                self._begin(optimizer, False)
        self._depth += 1
        if closure is None or isinstance(closure, _TrackedClosure):
            return None
        tracked = _TrackedClosure(closure, self, optimizer)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": tracked}
        return (args[0], tracked, *args[2:]), kwargs

    @concise
    def _begin_update(self, *_: Any) -> None:
        if self._is_update_due:
            self._is_update_due = False
            self._version = None
            try:
                self._before_update()
            except BaseException:
                self._depth = 0
                raise

    @concise
    def _end_update(self, *_: Any) -> None:
        if self._depth == 1 and not is_creating_state():
            self._after_update()

    def _begin(self, optimizer: Optimizer, has_gradients: bool) -> None:
        self._before(optimizer, has_gradients)
        self._has_begun = True

    def _evaluate(self, closure: Closure, optimizer: Optimizer) -> Any:
        """Run a step's closure, which may run the model; if it raises, the step has ended."""
        self._num_closures += 1
        try:
            self._before_evaluation()
            result = closure()
            if not self._has_begun:
                self._begin(optimizer, True)
            self._version = None
            self._before_update()
            return result
        except BaseException:
            self._depth = 0
            raise
        finally:
            self._num_closures -= 1

    @concise
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_creating_state():
            return
        self._depth -= 1
        if self._depth == 0:
            if not self._has_begun:  # the optimizer has not evaluated its closure
                self._begin(optimizer, True)
            self._after()


class _TrackedClosure:
    def __init__(self, closure: Closure, hook: StepHook, optimizer: Optimizer) -> None:
        self._closure, self._hook, self._optimizer = closure, hook, optimizer

    def __call__(self) -> Any:
        return self._hook._evaluate(self._closure, self._optimizer)


class StepHooks:
    """Callbacks around every training step, which is one step of each of several optimizers.

    They are stepped in any order, without closures, which would evaluate the model between their
    updates. The optimizers hold this object, which holds none of them. Callbacks are those of
    ``StepHook``, but ``before_update`` gets the index of the optimizer, and whether it is first.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        after: Callable[[], None],
        before: Callable[[Optimizer, bool], None],
        before_update: Callable[[int, bool], None],
        after_update: Callable[[], None],
    ) -> None:
        self._before, self._after, self._before_update = before, after, before_update
        self._names = name_optimizers(optimizers)
        self._stepped: set[int] = set()  # in this training step
        self._hooks = [
            weakref.ref(
                StepHook(
                    optimizer,
                    partial(self._after_one, index),
                    partial(self._before_one, index),
                    partial(self._before_update_of, index),
                    partial(self._refuse_closure, index),
                    after_update,
                )
            )
            for index, optimizer in enumerate(optimizers)
        ]

    def find_unfinished(self) -> str | None:
        """Return which optimizers have stepped and which have not, or None between two steps."""
        if not self._stepped:
            return None
        waiting = self._names_of(set(range(len(self._names))) - self._stepped)
        return f"a step of {self._names_of(self._stepped)} and none of {waiting}"

    def see_forward(self, *, watches: bool = False) -> None:
        """Record a forward pass, as ``StepHook.see_forward``."""
        for hook in self._alive():
            hook.see_forward(watches=watches)

    def reset(self) -> None:
        """Begin a new training step."""
        self._stepped.clear()
        for hook in self._alive():
            hook.reset()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._alive():
            hook.close()

    def _alive(self) -> list[StepHook]:
        return [hook for reference in self._hooks if (hook := reference())]

    def _names_of(self, indices: Iterable[int]) -> str:
        return " and ".join(self._names[index] for index in sorted(indices))

    def _before_one(self, index: int, optimizer: Optimizer, has_gradients: bool) -> None:
        if not has_gradients:
            self._refuse_closure(index)
        self._check_order(index)
        if not self._stepped:
            self._before(optimizer, has_gradients)

    def _check_order(self, index: int) -> None:
        if index in self._stepped:
            waiting = self._names_of(set(range(len(self._names))) - self._stepped)
            raise RuntimeError(
                "each of several optimizers must take one step in a training step, got a second "
                f"one of {self._names[index]} before one of {waiting}; nothing has been stepped: "
                f"call step() of {waiting} first, in every training step"
            )
        if gone := {each for each, hook in enumerate(self._hooks) if hook() is None}:
            raise RuntimeError(
                "all optimizers of a trainer must be kept and stepped, got a step of "
                f"{self._names[index]} after {self._names_of(gone)} was deleted; close() the "
                "trainer and wrap again with those that are left"
            )

    def _before_update_of(self, index: int) -> None:
        self._before_update(index, not self._stepped)

    def _refuse_closure(self, index: int) -> None:
        raise RuntimeError(
            "several optimizers must be stepped without a closure, which would evaluate the model "
            f"between their updates, got one for {self._names[index]}; call backward() once, then "
            "step() of each"
        )

    def _after_one(self, index: int) -> None:
        self._stepped.add(index)
        if len(self._stepped) == len(self._names):
            self._stepped.clear()
            self._after()


def refuse_capture() -> None:
    """Raise a RuntimeError while a CUDA graph is captured, before a trainer's step."""
    is_eager = not torch.compiler.is_compiling()
    if is_eager and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a trainer must step outside of a CUDA graph, got a call while one is captured: its "
            "replays would send the messages of this step again; capture forward and backward alone"
        )


def name_optimizers(optimizers: Sequence[object]) -> list[str]:
    """Return what errors call optimizers: their classes, with the index if there are several."""
    names = [type(optimizer).__name__ for optimizer in optimizers]
    if len(names) == 1:
        return names
    return [f"{name} (optimizer[{index}])" for index, name in enumerate(names)]


def closure_of(args: Any, kwargs: Any) -> Any:
    """Return the closure in the arguments that torch passes to a step's pre-hook, or None."""
    # The signature is step(closure=None), and torch passes the optimizer as args[0].
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def decays_only(optimizer: object) -> bool:
    """Return whether an optimizer, or each of several, reads parameters for their decay alone.

    Others may keep copies of them (as ASGD, averages and schedule-free ones do) or read their norm.
    """
    if isinstance(optimizer, JoinedOptimizers):
        return all(map(decays_only, optimizer.optimizers))
    return _is_known(optimizer) and not isinstance(optimizer, ASGD | Adafactor | LBFGS)


def _is_known(optimizer: object) -> bool:
    """Return whether an optimizer's step is torch's or ours."""
    known = ("torch.optim.", "pyparallel.optim.")
    step = optimizer.__class__.step  # type: ignore[attr-defined]  # also of a weak proxy
    return bool(step.__module__.startswith(known))


def _evaluates_once(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to evaluate a closure once, at its own parameters."""
    return _is_known(optimizer) and not isinstance(optimizer, LBFGS)
