"""Steps under AMP's ``GradScaler``, which would leave ``optimizer.step()`` out where it finds inf.

A rank that leaves a step out must take its round all the same, or its neighbors wait for ever. So
the optimizer tells the scaler that it minds scales and infs itself (as torch's fused ones do), and
what it was told is minded here, before and after the optimizer's own step.
"""

import contextlib
import weakref
from typing import Any

from torch import Tensor


class ScaledSteps:
    """Unscales the gradients of a step, or hides them from a step that must change nothing."""

    # torch declares none of these attributes, and who drops an optimizer that is trained with drops
    # the trainer in its hooks: nothing may lead back.
    def __init__(self, optimizer: Any) -> None:
        self._optimizer: Any = weakref.proxy(optimizer)
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._is_ours = not getattr(optimizer, "_step_supports_amp_scaling", False)
        if self._is_ours:
            optimizer._step_supports_amp_scaling = True

    def begin(self) -> None:
        """Before the step: do what the scaler has asked for, if it has."""
        found_inf = getattr(self._optimizer, "found_inf", None)
        if not self._is_ours or found_inf is None:
            return
        scale, self._optimizer.grad_scale = self._optimizer.grad_scale, None
        self._optimizer.found_inf = None
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        with_gradients = [p for p in parameters if p.grad is not None]
        if float(found_inf):  # torch says 0, a number, where there are no gradients
            self._hidden = [(p, p.grad) for p in with_gradients]
            for parameter in with_gradients:
                parameter.grad = None
        elif scale is not None:
            inverse = scale.double().reciprocal().float()  # rounded as the scaler would
            for parameter in with_gradients:
                parameter.grad.mul_(inverse.to(parameter.device))

    def end(self) -> None:
        """After the step: the gradients are the user's again."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []

    def close(self) -> None:
        """Leave the optimizer as it was found, if it still lives."""
        if self._is_ours:
            with contextlib.suppress(ReferenceError):
                del self._optimizer._step_supports_amp_scaling
