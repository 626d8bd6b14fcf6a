"""Shared parts of the optimizer steps: gradients, mixing of messages, outputs, and their checks."""

from collections.abc import Sequence

import torch
from torch import Tensor, float32, float64

from . import _checks
from .mix import check_masses, mix_reference


def mixed(param: Tensor, mass: Tensor, messages: list[Tensor], masses: Tensor) -> Tensor:
    """Return the parameters in fp32 after ``mix_``; the messages' masses are added to ``mass``."""
    z = param.to(torch.float32, copy=True)
    if messages:
        mix_reference(z, mass, messages, masses)
    return z


def placed(
    grads: list[Tensor],
    offsets: list[int],
    param: Tensor,
    maximize: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    nonfinite: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the flat gradient in fp32, scaled and signed, and which elements are stepped.

    With ``nonfinite``, those are not whose gradient is infinite or nan; they are counted.
    """
    gradient = torch.zeros_like(param, dtype=float32)
    stepped = torch.zeros_like(param, dtype=torch.bool)
    for grad, offset in zip(grads, offsets, strict=True):
        gradient[offset : offset + grad.numel()] = grad.flatten()
        stepped[offset : offset + grad.numel()] = True
    if grad_scale is not None:
        gradient = gradient * (1 / grad_scale.double()).float()
    if found_inf is not None:
        stepped = stepped & (found_inf == 0).to(param.device)
    if nonfinite is not None:
        is_finite = gradient.isfinite()
        nonfinite.add_((stepped & ~is_finite).sum())
        stepped = stepped & is_finite
    return -gradient if maximize else gradient, stepped


def settle(
    param: Tensor,
    z: Tensor,
    mass: Tensor,
    messages: list[Tensor],
    masses: Tensor,
    mix_after: bool,
    message: Tensor | None,
) -> None:
    """Write the stepped values ``z``, mixed if that is still to be done, and the next message."""
    if message is not None and mix_after:
        message.copy_(z)
    param.copy_(mixed(z, mass, messages, masses) if mix_after else z)
    if message is not None and not mix_after:
        message.copy_(param)


def check_step(
    param: Tensor,
    grad: Tensor | Sequence[Tensor],
    offsets: Sequence[int] | None,
    others: dict[str, Tensor],
    messages: Sequence[Tensor],
    horizon: _checks.Number,
    outputs: dict[str, Tensor | None],
    scaling: dict[str, Tensor | None],
) -> tuple[list[Tensor], list[int]]:
    """Raise on buffers unlike ``param``; return gradients and offsets, as the ops take them."""
    _checks.check_buffer("param", param)
    grads = check_grads(param, grad, offsets)
    written = {name: output for name, output in outputs.items() if output is not None}
    _checks.check_all_like({**others, **written}, messages, "param", param)
    _checks.check_at_least("horizon", horizon, 0)
    if outputs["prediction"] is None and not isinstance(horizon, Tensor):
        _checks.require("horizon", "0 where no prediction is given", horizon, horizon == 0)
    for name, tensor in scaling.items():
        if tensor is not None:
            check_scaling(name, tensor, param)
    return list(grads.values()), [0] if offsets is None else list(offsets)


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
        masses = torch.empty(0, dtype=float64)
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
