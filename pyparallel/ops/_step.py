"""Shared parts of the optimizer steps: gradients, mixing of messages, outputs, and their checks."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, float32, float64

from . import _checks
from .mix import check_masses, mix_reference


class Shared(NamedTuple):
    """What both steps take from ``mass`` on, in the order of the schemas; see ``adamw_step_``."""

    mass: Tensor
    messages: list[Tensor]
    masses: Tensor
    mix_after: bool
    grad_scale: Tensor | None
    found_inf: Tensor | None
    nonfinite: Tensor | None
    horizon: Tensor
    prediction: Tensor | None
    message: Tensor | None


def mixed(param: Tensor, shared: Shared, *, after: bool) -> Tensor:
    """Return the parameters in fp32 after ``mix_``, if messages are mixed before or after the step.

    The messages' masses are added to ``mass``.
    """
    z = param.to(torch.float32, copy=True)
    if shared.messages and shared.mix_after == after:
        mix_reference(z, shared.mass, shared.messages, shared.masses)
    return z


def placed(
    grads: list[Tensor], offsets: list[int], param: Tensor, maximize: bool, shared: Shared
) -> tuple[Tensor, Tensor]:
    """Return the flat gradient in fp32, scaled and signed, and which elements are stepped.

    With ``nonfinite``, those are not whose gradient is infinite or nan; they are counted.
    """
    gradient = torch.zeros_like(param, dtype=float32)
    stepped = torch.zeros_like(param, dtype=torch.bool)
    for grad, offset in zip(grads, offsets, strict=True):
        gradient[offset : offset + grad.numel()] = grad.flatten()
        stepped[offset : offset + grad.numel()] = True
    if shared.grad_scale is not None:
        gradient = gradient * (1 / shared.grad_scale.double()).float()
    if shared.found_inf is not None:
        stepped = stepped & (shared.found_inf == 0).to(param.device)
    if shared.nonfinite is not None:
        is_finite = gradient.isfinite()
        shared.nonfinite.add_((stepped & ~is_finite).sum())
        stepped = stepped & is_finite
    return -gradient if maximize else gradient, stepped


def settle(param: Tensor, z: Tensor, shared: Shared) -> None:
    """Write the stepped values ``z``, mixed if that is still to be done, and the next message."""
    if shared.message is not None and shared.mix_after:
        shared.message.copy_(z)
    param.copy_(mixed(z, shared, after=True))
    if shared.message is not None and not shared.mix_after:
        shared.message.copy_(param)


def check_step(
    param: Tensor,
    grad: Tensor | Sequence[Tensor],
    offsets: Sequence[int] | None,
    others: dict[str, Tensor],
    mixing: tuple[Tensor | None, Sequence[Tensor], Tensor | None, bool],
    scaling: tuple[Tensor | None, Tensor | None, Tensor | None],
    outputs: tuple[_checks.Number, Tensor | None, Tensor | None],
) -> tuple[list[Tensor], list[int], Shared]:
    """Raise on buffers unlike ``param``; return gradients, offsets and the rest for the ops.

    ``mixing``, ``scaling`` and ``outputs`` are ``Shared`` as the caller has given it.
    """
    mass, messages, masses, mix_after = mixing
    horizon, prediction, message = outputs
    _checks.check_buffer("param", param)
    grads = check_grads(param, grad, offsets)
    written = {"message": message, "prediction": prediction}
    others = others | {name: each for name, each in written.items() if each is not None}
    _checks.check_all_like(others, messages, "param", param)
    _checks.check_at_least("horizon", horizon, 0)
    if prediction is None and not isinstance(horizon, Tensor):
        _checks.require("horizon", "0 where no prediction is given", horizon, horizon == 0)
    for name, tensor in zip(SCALING, scaling, strict=True):
        if tensor is not None:
            check_scaling(name, tensor, param)
    own, theirs = take_masses(param, mass, messages, masses)
    ahead = _checks.as_scalar("horizon", horizon, param)
    shared = Shared(own, list(messages), theirs, mix_after, *scaling, ahead, prediction, message)
    return list(grads.values()), [0] if offsets is None else list(offsets), shared


SCALING = {"grad_scale": float32, "found_inf": float32, "nonfinite": float64}


def check_scaling(name: str, tensor: Tensor, param: Tensor) -> None:
    """Raise unless a scalar of gradient scaling is 0-d, of its dtype, where it can be read."""
    dtype = SCALING[name]
    # What is counted is written by the kernel.
    _checks.check_tensor(name, tensor, dtype, (), param.device, or_cpu=dtype != float64)


def check_grads(
    param: Tensor, grad: Tensor | Sequence[Tensor], offsets: Sequence[int] | None
) -> dict[str, Tensor]:
    """Return the gradients by their names in errors; raise unless each has its place in param."""
    if isinstance(grad, Tensor):
        if offsets is not None:
            raise ValueError(f"offsets must be None with one gradient, got {list(offsets)}")
        _checks.check_like("grad", grad, "param", param)
        return {"grad": grad}
    if offsets is None or len(offsets) != len(grad):
        got = None if offsets is None else f"{len(offsets)} entries"
        raise ValueError(f"offsets must have an entry for each of {len(grad)} gradients, got {got}")
    grads = _checks.by_index("grad", grad)
    end = 0
    for index, (name, each, offset) in enumerate(zip(grads, grad, offsets, strict=True)):
        fits = (
            each.dtype in _checks.FLOAT_DTYPES
            and each.is_contiguous()
            and each.device == param.device
        )
        if not fits:
            raise ValueError(
                f"{name} must be a contiguous tensor of float32, bfloat16 or float16 "
                f"on {param.device}, got {_checks.describe(each)}"
            )
        last = param.numel() - each.numel()
        if not end <= offset <= last:
            raise ValueError(
                f"offsets[{index}] must be from {end}, where the gradient before it ends, to "
                f"{last}, for {name} to end inside param, got {offset}"
            )
        end = offset + each.numel()
    _checks.check_one_dtype("grad", list(grad))
    return grads


def take_masses(
    param: Tensor, mass: Tensor | None, messages: Sequence[Tensor], masses: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the rank's own mass and the messages' masses as the ops take them."""
    if masses is None:
        if messages:
            raise ValueError(f"masses must be given with {len(messages)} messages, got None")
        masses = torch.empty(0, dtype=float64, device="cpu")
    if mass is None:
        # Without messages it is only a scalar, which need not be on the device.
        mass = torch.scalar_tensor(1, dtype=float64, device=param.device if messages else None)
    else:
        _checks.check_doubles("mass", mass, (), param, "param")
    _checks.check_doubles(
        "masses", masses, (len(messages),), param if messages else masses, "param"
    )
    if mass.is_cpu and _checks.has_memory(mass):
        check_masses("mass", mass.item(), masses.tolist())
    return mass, masses
