"""Parameters and gradients with a nan or an inf: found before a merge, or kept from a step."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

States = Mapping[str, Mapping[str, Tensor]]


def first_nonfinite(parts: Mapping[str, Tensor], states: States, device: torch.device) -> Tensor:
    """Return the index of the first tensor to be merged that is not finite, (1,) int64, or -1.

    Reads all of them once. Buffers may have an inf, as masks do, but no nan.

    Args:
        parts: the subnet's tensors by name.
        states: the optimizer's state that moves with them, by name and key.
        device: of the result.
    """
    verdicts = [_is_sound(each) for _, each in _merged(parts, states)]
    if not verdicts:
        return torch.full((1,), -1, device=device)
    is_bad = torch.stack(verdicts).logical_not()
    first = is_bad.long().argmax()
    return torch.where(is_bad.any(), first, -1).view(1).to(device)


def name_of(index: int, parts: Mapping[str, Tensor], states: States) -> str:
    """Return the name that an index of `first_nonfinite` stands for."""
    return [name for name, _ in _merged(parts, states)][index]


def _merged(parts: Mapping[str, Tensor], states: States) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors of a merge, in the same order on all ranks."""
    for name, part in parts.items():
        yield name, part
        for key, state in states.get(name, {}).items():
            yield f"the optimizer's {key} of {name}", state


def _is_sound(tensor: Tensor) -> Tensor:
    """Return whether a tensor can be merged, as 0-d bool."""
    is_buffer = not isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    bounds = torch.stack(tensor.aminmax())
    return (bounds.isnan().logical_not() if is_buffer else bounds.isfinite()).all()


def _are_finite(tensors: list[Tensor]) -> bool:
    """Return whether all entries are finite; reads them again where a norm overflows."""
    if not tensors:
        return True
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(tensors)])
    return bool(norms.isfinite().all()) or all(bool(t.isfinite().all()) for t in tensors)


class FiniteSteps:
    """Keeps gradients with a nan or an inf from an optimizer's steps.

    Such a step changes nothing but counts. The gradients are read once before it, or after each
    evaluation of its closure; the host waits for the result. A ``GradScaler`` of an optimizer that
    handles ``found_inf`` itself decides alone.

    Args:
        optimizer: gets hooks. They must be registered before those that count its steps.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._hide(optimizer)
            return None
        if isinstance(closure, _CheckedClosure):
            return None
        checked = _CheckedClosure(closure, lambda: self._hide(optimizer))
        if "closure" in kwargs:
            return args, {**kwargs, "closure": checked}
        return (args[0], checked, *args[2:]), kwargs

    def _hide(self, optimizer: Optimizer) -> None:
        if getattr(optimizer, "found_inf", None) is not None:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found = [(p, p.grad) for p in parameters if p.grad is not None]
        dense = [g._values() if g.layout == torch.sparse_coo else g for _, g in found]
        if _are_finite(dense):
            return
        self._hidden = found
        for parameter, _ in found:
            parameter.grad = None

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Restore the gradients, for users who look at them."""
        for parameter, gradient in self._hidden:
            if parameter.grad is None:
                parameter.grad = gradient
        self._hidden = []


class _CheckedClosure:
    """A closure, after which the gradients are looked at."""

    def __init__(self, closure: Callable[[], Any], look: Callable[[], None]) -> None:
        self._closure, self._look = closure, look

    def __call__(self) -> Any:
        loss = self._closure()
        self._look()
        return loss
