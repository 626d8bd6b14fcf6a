"""Optimizer steps under AMP's ``GradScaler``, which would skip ``optimizer.step()`` on inf.

A rank that skips a step must still take its round, or its neighbors would wait forever. So the
optimizer declares that it handles scales and infs itself (as torch's fused ones do), and they are
handled here, before and after the optimizer's own step.
"""

import contextlib
import weakref
from typing import Any

from torch import Tensor


class ScaledSteps:
    """Unscales the gradients of a step, or hides them from a step that must be skipped.

    The optimizer's hooks reference the trainer, so it is only weakly referenced here.
    """

    # Any: torch declares none of these attributes.
    def __init__(self, optimizer: Any) -> None:
        self._optimizer: Any = weakref.proxy(optimizer)
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._is_ours = not getattr(optimizer, "_step_supports_amp_scaling", False)
        if self._is_ours:
            optimizer._step_supports_amp_scaling = True

    def begin(self) -> None:
        """Unscale or hide the gradients, if a scaler is in use; called before the step."""
        found_inf = getattr(self._optimizer, "found_inf", None)
        if not self._is_ours or found_inf is None:
            return
        scale, self._optimizer.grad_scale = self._optimizer.grad_scale, None
        self._optimizer.found_inf = None
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        with_gradients = [p for p in parameters if p.grad is not None]
        if float(found_inf):  # torch sets the number 0 if there are no gradients
            self._hidden = [(p, p.grad) for p in with_gradients]
            for parameter in with_gradients:
                parameter.grad = None
        elif scale is not None:
            inverse = scale.double().reciprocal().float()  # rounds as the scaler does
            for parameter in with_gradients:
                parameter.grad.mul_(inverse.to(parameter.device))

    def end(self) -> None:
        """Restore hidden gradients; called after the step."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []

    def close(self) -> None:
        """Restore the optimizer's attributes, if it still exists."""
        if self._is_ours:
            with contextlib.suppress(ReferenceError):
                del self._optimizer._step_supports_amp_scaling
