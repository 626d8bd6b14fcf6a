"""Optimizer steps counted once each: nested and failed steps do not count."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Closure = Callable[[], Any]


@dataclass
class StepCounts:
    """Count what a rank has done since its trainer was made, for comparison between ranks.

    Args:
        steps: optimizer steps, those inside ``no_sync()`` included.
        repeats: steps without a training forward since the step before.
        forwards: training forwards.
        nonfinite: number of non-finite gradient elements of the step just taken; on GPUs 0-d
            float64 on the device.
    """

    steps: int = 0
    repeats: int = 0
    forwards: int = 0
    nonfinite: float | Tensor = 0.0


class StepHook:
    """Callbacks before and after every optimizer step.

    An optimizer whose step calls its parent's step runs the hooks of both, and a step that raises
    does not run its post hooks. Only the outermost of nested steps counts, and only if it returns.

    Args:
        optimizer: the optimizer whose step hooks are used.
        after: called after a step.
        before: called before a step with the optimizer and whether the step has a closure; if it
            raises, the step has not started.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        after: Callable[[], None],
        before: Callable[[Optimizer, bool], None] | None = None,
    ) -> None:
        self._before, self._after = before, after
        self._depth = 0
        self._num_closures = 0  # running now
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def see_forward(self) -> None:
        """Record a forward pass: outside of a closure, no step is in progress."""
        if not self._num_closures:
            self._depth = 0

    def run_closure(self, closure: Closure) -> Any:
        """Run a step's closure, which may run the model; if it raises, the step has ended."""
        self._num_closures += 1
        try:
            return closure()
        except BaseException:
            self._depth = 0
            raise
        finally:
            self._num_closures -= 1

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        # The signature is step(closure=None), and torch passes the optimizer as args[0].
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None and self._depth and not isinstance(closure, _TrackedClosure):
            self._depth = 0
            raise RuntimeError(
                "optimizer.step(closure) must not start before the previous step has returned, got "
                "an interrupted or a nested one; call it again"
            )
        if self._depth == 0 and self._before is not None:
            self._before(optimizer, closure is not None)
        self._depth += 1
        if closure is None or isinstance(closure, _TrackedClosure):
            return None
        tracked = _TrackedClosure(closure, self)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": tracked}
        return (args[0], tracked, *args[2:]), kwargs

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._after()


class _TrackedClosure:
    """A closure passed to an optimizer, run by ``StepHook.run_closure``."""

    def __init__(self, closure: Closure, hook: StepHook) -> None:
        self._closure, self._hook = closure, hook

    def __call__(self) -> Any:
        return self._hook.run_closure(self._closure)
