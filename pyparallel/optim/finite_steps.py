"""Steps whose gradients hold an inf or a nan, found by AMP's ``GradScaler`` or by the trainer.

A rank of a gossip algorithm that skips a step must still take its round, or its neighbors would
wait forever. So the optimizer declares that it handles scales and infs itself (as torch's fused
ones do), and they are handled here, before and after the optimizer's own step.
"""

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor

from ..comm import StepCounts
from ..comm.arguments import NonFinitePolicy
from ..ops._corrupt import CorruptCounter
from .fused_optimizer import FusedOptimizer


class FiniteSteps:
    """Unscales the gradients of a step, or keeps those that are not finite from the update.

    A ``GradScaler`` that is in use decides alone. Otherwise the gradients are read once more before
    the update. If one is not finite the update is skipped: gradients are hidden from it, and an
    optimizer that supports AMP gets ``found_inf``. On a GPU "raise" does not wait for what it
    finds: an optimizer without that support then steps with 0 in place of such elements. One of
    ``pyparallel.optim`` with "raise" leaves such elements out and counts them in its own pass.

    Args:
        optimizer: its hooks reference the trainer, so it is only weakly referenced here.
        policy: "allow": gradients are not read.
        counts: gets the number of non-finite elements; on a GPU with "raise" 1 or 0 unless the
            optimizer counts.
        device: of the gradients.
        takes_scales: whether a ``GradScaler`` leaves it to this object to unscale and to skip, and
            calls every step; else it does both by itself and leaves out the step.
    """

    # Any: torch declares none of these attributes.
    def __init__(
        self,
        optimizer: Any,
        policy: NonFinitePolicy,
        counts: StepCounts,
        device: torch.device,
        *,
        takes_scales: bool = True,
    ) -> None:
        self._optimizer: Any = weakref.proxy(optimizer)
        self._policy, self._counts = policy, counts
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._found_inf: Tensor | None = None  # that this object has set
        self._is_ours = not getattr(optimizer, "_step_supports_amp_scaling", False)
        self._takes_scales = self._is_ours and takes_scales
        if self._takes_scales:
            optimizer._step_supports_amp_scaling = True
        self._counts_in_pass = policy == "raise" and isinstance(optimizer, FusedOptimizer)
        self._in_pass = torch.zeros((), dtype=torch.float64, device=device)
        self._counter: CorruptCounter | None = None  # None: the host waits
        if policy == "raise" and device.type != "cpu":
            self._counter = CorruptCounter(device)
        self.found: Tensor | None = None
        """The first parameter whose gradient was not finite in this step, if the host knows."""

    def begin(self) -> None:
        """Unscale, check or hide the gradients; called before the update."""
        self.end()
        self._counts.nonfinite, self.found = 0.0, None
        found_inf = getattr(self._optimizer, "found_inf", None)
        if found_inf is None:
            if self._counts_in_pass:
                self._optimizer.nonfinite = self._counts.nonfinite = self._in_pass.zero_()
            elif self._policy != "allow":
                self._check()
        elif self._is_ours:
            scale, self._optimizer.grad_scale = self._optimizer.grad_scale, None
            self._optimizer.found_inf = None
            if float(found_inf):  # torch sets the number 0 if there are no gradients
                self._hide()
            elif scale is not None:
                inverse = scale.double().reciprocal().float()  # rounds as the scaler does
                for parameter in self._with_gradients():
                    parameter.grad.mul_(inverse.to(parameter.device))

    def end(self) -> None:
        """Restore what was hidden; called after the update."""
        for parameter, gradient in self._hidden:
            if parameter.grad is None:
                parameter.grad = gradient
        self._hidden = []
        if self._found_inf is not None:
            if getattr(self._optimizer, "found_inf", None) is self._found_inf:
                del self._optimizer.grad_scale, self._optimizer.found_inf
            self._found_inf = None
        if self._counts_in_pass and self._optimizer.nonfinite is not None:
            self._optimizer.nonfinite = None
            if self._counter is not None:
                self._counter.tensor += self._in_pass != 0
            elif float(self._in_pass):
                self.found = next(
                    (p for p in self._with_gradients() if not bool(p.grad.isfinite().all())), None
                )

    def num_found_late(self) -> int:
        """Return in how many steps of a GPU one was found of which the host has not heard yet."""
        return 0 if self._counter is None else self._counter.num_unreported()

    def close(self) -> None:
        """Restore the optimizer's attributes, if it still exists."""
        with contextlib.suppress(ReferenceError):
            if self._takes_scales:
                del self._optimizer._step_supports_amp_scaling
            elif self._counts_in_pass:
                self._optimizer.nonfinite = None

    @torch.no_grad()
    def _check(self) -> None:
        parameters = self._with_gradients()
        gradients = [_values(parameter.grad) for parameter in parameters]
        if not any(gradient.numel() for gradient in gradients):
            return
        if self._counter is not None:
            self._check_on_device([each for each in gradients if each.numel()])
            return
        # A norm may overflow where no element does; one that is finite has read finite ones only.
        if bool(_norms(gradients, 2.0).isfinite().all()):
            return
        number = 0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            found = gradient.numel() - int(gradient.isfinite().sum())
            if found and not number:
                self.found = parameter
            number += found
        self._counts.nonfinite = float(number)
        if number and self._is_ours:
            self._hide()
        elif number:
            self._set_found_inf(torch.ones((), device=gradients[0].device))

    def _check_on_device(self, gradients: list[Tensor]) -> None:
        assert self._counter is not None
        found = _norms(gradients, float("inf")).isfinite().all().logical_not()
        self._counts.nonfinite = found.double()
        self._counter.tensor += found
        if not self._is_ours:
            self._set_found_inf(found.float())
            return
        for gradient in gradients:
            gradient.nan_to_num_(0.0, 0.0, 0.0)

    def _set_found_inf(self, found_inf: Tensor) -> None:
        self._found_inf = self._optimizer.found_inf = found_inf
        self._optimizer.grad_scale = None

    def _hide(self) -> None:
        self._hidden = [(p, p.grad) for p in self._with_gradients()]
        for parameter, _ in self._hidden:
            parameter.grad = None

    def _with_gradients(self) -> list[Any]:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        return [p for p in parameters if p.grad is not None]


def _values(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.layout == torch.sparse_coo else gradient


def _norms(gradients: list[Tensor], order: float) -> Tensor:
    return torch.stack([norm.float() for norm in torch._foreach_norm(gradients, order)])
