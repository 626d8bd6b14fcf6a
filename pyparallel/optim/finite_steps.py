"""Steps whose gradients hold an inf or a nan, found by AMP's ``GradScaler`` or by the trainer.

A rank of a gossip algorithm that skips a step must still take its round, or its neighbors would
wait forever. So the optimizer declares that it handles scales and infs itself (as torch's fused
ones do), and they are handled here, before and after the optimizer's own step.
"""

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..comm import Run, StepCounts
from ..ops._corrupt import CorruptCounter
from ..ops.sgd_step import clear_nonfinite_unchecked
from ..training.nonfinite import NonFinitePolicy, all_finite, count_nonfinite, first_nonfinite
from ..training.shards import gather, local_of
from .fused_optimizer import FusedOptimizer


class FiniteSteps:
    """Unscales the gradients of a step, or keeps those that are not finite from the update.

    A ``GradScaler`` that is in use decides alone, for each optimizer. Otherwise the gradients of
    all are read once more before the first update; if one is not finite all updates are skipped:
    gradients are hidden from them, and an optimizer that supports AMP gets ``found_inf``. On a GPU
    "raise" does not wait for what it finds: an optimizer without that support then steps with 0 in
    place of such elements. One of ``pyparallel.optim`` with "raise" leaves such elements out and
    counts them in its own pass.

    Optimizers are only weakly referenced. ``counts`` gets the number of non-finite elements; on a
    GPU with "raise" 1 or 0 unless the optimizer counts. With ``takes_scales`` a ``GradScaler``
    leaves it to this object to unscale and to skip, and calls every step; else it leaves out steps.
    The ranks of a ``replica``, which hold parts of it, leave out an update together: they tell each
    other what they found, and the host waits for it.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        policy: NonFinitePolicy,
        counts: StepCounts,
        device: torch.device,
        *,
        takes_scales: bool = True,
        replica: Run | None = None,
    ) -> None:
        self._handled = [_handle(optimizer, takes_scales) for optimizer in optimizers]
        self._policy, self._counts, self._replica = policy, counts, replica
        self._begun: set[int] = set()  # optimizers in this training step
        self._is_found: bool | Tensor | None = None  # in this training step; None: not read
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._found_inf: tuple[Any, Tensor] | None = None  # that this object has set, and where
        in_pass = len(optimizers) == 1 and isinstance(optimizers[0], FusedOptimizer)
        self._counts_in_pass = policy == "raise" and in_pass and replica is None
        self._in_pass = torch.zeros((), dtype=torch.float64, device=device)
        self._counter: CorruptCounter | None = None  # None: the host waits
        if policy == "raise" and device.type != "cpu" and replica is None:
            self._counter = CorruptCounter(device)
        self.found: Tensor | None = None
        """The first parameter whose gradient was not finite in this step, if the host knows."""
        self.num_skipped = 0
        """Training steps that have left out an update, as far as the host knows."""
        self._is_skipped = False  # the current one

    def begin(self, index: int = 0, is_first: bool = True) -> None:
        """Unscale, check or hide the gradients of an optimizer, before its update."""
        self.end()
        if is_first:
            self._counts.count_nonfinite(0.0)
            self.found = None
            self._begun, self._is_found, self._is_skipped = set(), None, False
        handled = self._handled[index]
        if getattr(handled.optimizer, "found_inf", None) is not None:
            if handled.is_ours:
                self._unscale(handled.optimizer)
        elif self._counts_in_pass:
            handled.optimizer.nonfinite = self._in_pass.zero_()
            self._counts.count_nonfinite(self._in_pass)
        elif self._policy != "allow":
            if self._is_found is None:
                self._is_found = self._check()
            self._keep_from_update(handled)
        self._begun.add(index)

    def end(self) -> None:
        """Restore what was hidden; called after the update of each optimizer."""
        for parameter, gradient in self._hidden:
            if parameter.grad is None:
                parameter.grad = gradient
        self._hidden = []
        if self._found_inf is not None:
            optimizer, found_inf = self._found_inf
            if getattr(optimizer, "found_inf", None) is found_inf:
                del optimizer.grad_scale, optimizer.found_inf
            self._found_inf = None
        if self._counts_in_pass and self._handled[0].optimizer.nonfinite is not None:
            optimizer = self._handled[0].optimizer
            optimizer.nonfinite = None
            if self._counter is not None:
                self._counter.tensor += self._in_pass != 0
            elif float(self._in_pass):
                self._count_skipped()
                parameters = _with_gradients(optimizer)
                index = first_nonfinite(parameter.grad for parameter in parameters)
                self.found = parameters[index] if index >= 0 else None

    def num_found_late(self) -> int:
        """Return in how many steps of a GPU one was found of which the host has not heard yet."""
        return 0 if self._counter is None else self._counter.num_unreported()

    def close(self) -> None:
        """Restore the attributes of the optimizers that still exist."""
        for handled in self._handled:
            with contextlib.suppress(ReferenceError):
                if handled.takes_scales:
                    del handled.optimizer._step_supports_amp_scaling
                elif self._counts_in_pass:
                    handled.optimizer.nonfinite = None

    def _unscale(self, optimizer: Any) -> None:
        """Do what a ``GradScaler`` has left to this object."""
        scale, optimizer.grad_scale = optimizer.grad_scale, None
        found_inf, optimizer.found_inf = optimizer.found_inf, None
        if float(found_inf):  # torch sets the number 0 if there are no gradients
            self._count_skipped()
            self._hide(optimizer)
        elif scale is not None:
            inverse = scale.double().reciprocal().float()  # rounds as the scaler does
            for parameter in _with_gradients(optimizer):
                local_of(parameter.grad).mul_(inverse.to(parameter.device))

    @torch.no_grad()
    def _check(self) -> bool | Tensor:
        """Count in the gradients of the optimizers that have not begun; return if any was found."""
        waiting = [each for i, each in enumerate(self._handled) if i not in self._begun]
        parameters = [p for each in waiting for p in _with_gradients(each.optimizer)]
        gradients = _values_of(parameters)
        are_finite = all_finite(gradients)
        if self._replica is not None:
            numbers = [] if are_finite else list(map(count_nonfinite, gradients))
            first = next((index for index, number in enumerate(numbers) if number), 0)
            rows = gather(self._replica, [sum(numbers), first])
            total = sum(row[0] for row in rows)
            self._counts.count_nonfinite(total)
            if total:
                self.found = parameters[min(int(row[1]) for row in rows if row[0])]
            return bool(total)
        if self._counter is not None and any(gradient.numel() for gradient in gradients):
            found = are_finite.logical_not()
            self._counts.count_nonfinite(found.double())
            self._counter.tensor += found
            return found
        if are_finite:
            return False
        numbers = list(map(count_nonfinite, gradients))
        self.found = next(p for p, number in zip(parameters, numbers, strict=True) if number)
        self._counts.count_nonfinite(float(sum(numbers)))
        return True

    @torch.no_grad()
    def _keep_from_update(self, handled: "_Handled") -> None:
        if self._is_found is False or self._is_found is None:
            return
        optimizer, found = handled.optimizer, self._is_found
        if found is True:
            self._count_skipped()
        if not handled.is_ours:
            found_inf = torch.as_tensor(found, device=self._in_pass.device).float()
            self._found_inf = optimizer, found_inf
            optimizer.found_inf, optimizer.grad_scale = found_inf, None
        elif found is True:
            self._hide(optimizer)
        else:  # the host does not know
            clear_nonfinite_unchecked(_values_of(_with_gradients(optimizer)), found)

    def _count_skipped(self) -> None:
        self.num_skipped += not self._is_skipped
        self._is_skipped = True

    def _hide(self, optimizer: Any) -> None:
        self._hidden = [(p, p.grad) for p in _with_gradients(optimizer)]
        for parameter, _ in self._hidden:
            parameter.grad = None


class _Handled(NamedTuple):
    """An optimizer, whether its infs are left out here, and whether its scales are taken here."""

    optimizer: Any  # a weak proxy; torch declares none of the attributes
    is_ours: bool
    takes_scales: bool


def _handle(optimizer: Any, takes_scales: bool) -> _Handled:
    is_ours = not getattr(optimizer, "_step_supports_amp_scaling", False)
    if is_ours and takes_scales:
        optimizer._step_supports_amp_scaling = True
    return _Handled(weakref.proxy(optimizer), is_ours, is_ours and takes_scales)


def _with_gradients(optimizer: Any) -> list[Any]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [p for p in parameters if p.grad is not None]


def _values_of(parameters: list[Any]) -> list[Tensor]:
    """Return the gradients of parameters: of DTensors the shards, of sparse ones the values."""
    gradients: list[Tensor] = [parameter.grad for parameter in parameters]
    if all(type(gradient) is Tensor and gradient.layout == torch.strided for gradient in gradients):
        return gradients
    gradients = list(map(local_of, gradients))
    return [each._values() if each.layout == torch.sparse_coo else each for each in gradients]
