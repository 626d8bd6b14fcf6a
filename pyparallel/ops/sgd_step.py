"""``sgd_step_``: SGD fused with gossip averaging before and prediction after the step.

And ``clear_nonfinite_`` for the gradients of a step that is not fused.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._checks import Number, as_scalar, by_index, check_at_least, check_tensor, require
from ._library import checked, define
from ._step import Shared, check_step, mixed, placed, settle
from .predict_sgd import predict_sgd_reference


def sgd_step_reference(
    param: Tensor,
    grads: list[Tensor],
    offsets: list[int],
    momentum_buffer: Tensor | None,
    lr: Tensor,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    *rest: Any,
) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against.

    The update is ``predict_sgd`` one step ahead. On the numerator ``mass * param`` the decay is
    that of ``weight_decay * mass``, and the update is that of learning rate ``lr / mass``.
    """
    shared = Shared(*rest)
    z = mixed(param, shared, after=False)
    gradient, stepped = placed(grads, offsets, param, maximize, shared)
    gradient = gradient + (weight_decay * shared.mass).float() * z
    before = torch.zeros_like(z) if momentum_buffer is None else momentum_buffer.float()
    velocity = momentum * before + (1 - dampening) * gradient
    update = gradient + momentum * velocity if nesterov else velocity
    velocity = torch.where(stepped, velocity, before)
    if momentum_buffer is not None:
        momentum_buffer.copy_(velocity)
        velocity = momentum_buffer
    ahead = torch.empty_like(z)
    predict_sgd_reference(z, update, lr / shared.mass, torch.ones_like(lr), ahead)
    z = torch.where(stepped, ahead, z)
    settle(param, z, shared)
    if shared.prediction is not None:
        predict_sgd_reference(param, velocity, lr / shared.mass, shared.horizon, shared.prediction)


sgd_step_unchecked = define(
    "sgd_step_(Tensor(a!) param, Tensor[] grads, int[] offsets, Tensor(b!)? momentum_buffer, "
    "Tensor lr, float momentum, float dampening, float weight_decay, bool nesterov, "
    "bool maximize, Tensor(c!) mass, Tensor[] messages, Tensor masses, bool mix_after, "
    "Tensor? grad_scale, Tensor? found_inf, Tensor(d!)? nonfinite, Tensor horizon, "
    "Tensor(e!)? prediction, Tensor(f!)? message) -> ()",
    sgd_step_reference,
)
_sgd_step_checked = checked(sgd_step_unchecked)


def sgd_step_(
    param: Tensor,
    grad: Tensor | Sequence[Tensor],
    momentum_buffer: Tensor | None,
    *,
    lr: Number,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    offsets: Sequence[int] | None = None,
    maximize: bool = False,
    mass: Tensor | None = None,
    messages: Sequence[Tensor] = (),
    masses: Tensor | None = None,
    mix_after: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    nonfinite: Tensor | None = None,
    horizon: Number = 0,
    prediction: Tensor | None = None,
    message: Tensor | None = None,
) -> None:
    """Take a step of SGD in place, with messages mixed in and results emitted.

    1. ``messages`` are averaged into ``param``, as ``mix_`` does with ``mass`` and ``masses``;
       with ``mix_after`` between 3 and 4.
    2. SGD steps on the numerator ``mass * param`` of PushSum, as Stochastic Gradient Push does
       (Assran et al., arXiv 1811.10792): decay adds ``weight_decay * mass * param`` to the
       gradient, and the update is ``param -= lr / mass * velocity``. With mass 1 it is the plain
       step.
    3. ``message`` gets the new ``param``, to be sent next.
    4. ``prediction`` gets ``predict_sgd`` of the new ``param`` and momentum buffer with the
       learning rate ``lr / mass``; without a buffer, of the gradient with decay.

    Arguments that are not listed here, elements that are not stepped, rounding and errors are as
    for ``adamw_step_``; there is no ``step`` to count. Without a momentum buffer, the prediction of
    elements that are not stepped is the new ``param``.

    torch.optim.SGD ignores ``dampening`` in its first step; pass ``dampening=0`` there, with a
    momentum buffer of zeros.

    Args:
        param, grad, lr: as for ``adamw_step_``.
        momentum_buffer: (n,) in one of these dtypes: the velocity, zero before the first step.
            Written; with ``momentum=0`` it becomes the gradient with decay. None, only if
            momentum is 0: not kept.
        momentum: at least 0.
        dampening: dampening of the gradient in the velocity; as in torch it has no effect if
            momentum is 0.
        weight_decay: at least 0.
        nesterov: Nesterov momentum; as in torch it needs momentum and no dampening.
    """
    others = {}
    if momentum_buffer is not None:
        others["momentum_buffer"] = momentum_buffer
    elif momentum != 0:
        raise ValueError("momentum_buffer must be given where momentum is not 0, got None")
    mixing = mass, messages, masses, mix_after
    scaling, outputs = (grad_scale, found_inf, nonfinite), (horizon, prediction, message)
    grads, offsets, shared = check_step(param, grad, offsets, others, mixing, scaling, outputs)
    check_at_least("lr", lr, 0)
    check_at_least("momentum", momentum, 0)
    check_at_least("weight_decay", weight_decay, 0)
    if nesterov:
        require("momentum", "over 0 with nesterov", momentum, momentum > 0)
        require("dampening", "0 with nesterov", dampening, dampening == 0)
    _sgd_step_checked(
        param,
        grads,
        offsets,
        momentum_buffer,
        as_scalar("lr", lr, param),
        momentum,
        dampening if momentum else 0.0,
        weight_decay,
        nesterov,
        maximize,
        *shared,
    )


def clear_nonfinite_reference(tensors: list[Tensor], found: Tensor) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against."""
    for tensor in tensors:
        tensor.nan_to_num_(0.0, 0.0, 0.0)


clear_nonfinite_unchecked = define(
    "clear_nonfinite_(Tensor(a!)[] tensors, Tensor found) -> ()", clear_nonfinite_reference
)
_clear_nonfinite_checked = checked(clear_nonfinite_unchecked)


def clear_nonfinite_(tensors: Sequence[Tensor], found: Tensor) -> None:
    """Set the entries that are nan or inf to 0, in place, if there are any.

    The host does not read the flag. With Triton contiguous tensors of one dtype below float64 share
    a launch, which reads the flag, and is over if it is not set.

    Args:
        tensors: of any shapes and floating-point dtypes, on one device. Written.
        found: 0-d bool on their device: whether one of their entries is nan or inf.
    """
    for name, tensor in by_index("tensors", tensors).items():
        check_tensor("found", found, torch.bool, (), tensor.device, f"the device of {name}")
    _clear_nonfinite_checked(list(tensors), found)
