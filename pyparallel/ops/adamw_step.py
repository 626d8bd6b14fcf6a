"""``adamw_step_``: AdamW, with gossip's average before it and the prediction after, in one pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._checks import Number, as_scalar, check_one_dtype, require
from ._library import define
from ._step import check_step, mixed, take_masses
from .predict_adam import predict_adam_reference


def adamw_step_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: Tensor,
    maximize: bool,
    mass: Tensor,
    messages: list[Tensor],
    masses: Tensor,
    horizon: Tensor,
    prediction: Tensor | None,
    message: Tensor | None,
) -> None:
    """The op in plain PyTorch: what it means, and what every kernel is tested against.

    The update is ``predict_adam`` one step ahead. On the numerator ``mass * param`` the decay is
    the same factor, and the update that of a learning rate of ``lr / mass``.
    """
    z = mixed(param, mass, messages, masses) * (1 - lr * weight_decay).float()
    gradient = -grad.float() if maximize else grad.float()
    mean, square = exp_avg.float(), exp_avg_sq.float()
    # From the nearer operand: with beta1 = 0 the average is the gradient, exactly.
    near = 1 - beta1 < 0.5
    base, pull = (mean, 1 - beta1) if near else (gradient, -beta1)
    mean = base + pull * (gradient - mean)
    square = beta2 * square + (1 - beta2) * gradient * gradient
    exp_avg.copy_(mean)
    exp_avg_sq.copy_(square)
    numbers = (lr / mass, beta1, beta2, eps, step)
    predict_adam_reference(z, mean, square, *numbers, torch.ones_like(step), param)
    if message is not None:
        message.copy_(param)
    if prediction is not None:
        predict_adam_reference(param, exp_avg, exp_avg_sq, *numbers, horizon, prediction)


define(
    "adamw_step_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
    "Tensor lr, float beta1, float beta2, float eps, float weight_decay, Tensor step, "
    "bool maximize, Tensor(d!) mass, Tensor[] messages, Tensor masses, Tensor horizon, "
    "Tensor(e!)? prediction, Tensor(f!)? message) -> ()",
    adamw_step_reference,
)


def adamw_step_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: Number,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: Number,
    maximize: bool = False,
    mass: Tensor | None = None,
    messages: Sequence[Tensor] = (),
    masses: Tensor | None = None,
    horizon: Number = 0,
    prediction: Tensor | None = None,
    message: Tensor | None = None,
) -> None:
    """Take a step of AdamW in place; mix messages in before, emit results after, in one pass.

    1. ``messages`` are averaged into ``param``, as ``mix_`` does with ``mass`` and ``masses``.
    2. AdamW (Loshchilov & Hutter, arXiv 1711.05101) steps on the numerator ``mass * param`` of
       PushSum, as Stochastic Gradient Push does (Assran et al., arXiv 1811.10792): decoupled decay
       ``param *= 1 - lr * weight_decay`` is free of scale, and the update is
       ``param -= lr / mass * m_hat / (sqrt(v_hat) + eps)``. With mass 1 it is the plain step.
    3. ``message`` gets the new ``param``: what goes out next.
    4. ``prediction`` gets what ``predict_adam`` makes of the new ``param`` and moments with the
       learning rate ``lr / mass``.

    With fp32 parameters all this equals ``mix_``, the step, a copy and ``predict_adam`` one after
    another, to the last bit; 16-bit ones are rounded once, not twice. Every operation rounds, so
    that all implementations agree; torch's fused kernels contract some into multiply-adds, other
    ones on the CPU than on GPUs, and agree to one or two roundings. AMSGrad is not offered.

    Args:
        param: (n,) float32, bfloat16 or float16: the de-biased parameters. Written.
        grad: (n,) in one of these dtypes.
        exp_avg: (n,) in one of these dtypes: the first moment, zero before the first step. Written.
        exp_avg_sq: (n,) in exp_avg's dtype: the second moment, likewise. Written.
        lr: learning rate, at least 0; a number, or a 0-d tensor on the cpu or param's device.
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        eps: added to the denominator, at least 0.
        weight_decay: at least 0.
        step: the number of this step, 1 for the first; a number or a tensor like lr.
        maximize: ascend instead.
        mass: 0-d float64 on param's device: the own mass of PushSum; the messages' masses are added
            to it. None: 1.
        messages: k tensors (n,), all of one of these dtypes: de-biased parameters that arrived.
        masses: (k,) float64 on param's device: the mass that came with each message.
        horizon: how many steps ahead the prediction is, at least 0; a number or a tensor like lr.
        prediction: (n,) in one of these dtypes, written.
        message: (n,) in one of these dtypes, written.

    Raises:
        ValueError: a tensor of another shape, dtype, device or layout; a number out of range; an
            output that overlaps another buffer; on the CPU also masses below 0 or without a
            positive sum (elsewhere looking would stall).
    """
    others = {"grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    check_step(param, others, messages, horizon, {"prediction": prediction, "message": message})
    check_one_dtype("exp_avg and exp_avg_sq", [exp_avg, exp_avg_sq])
    require("lr", "at least 0", lr, lr >= 0)
    require("beta1", "in [0, 1)", beta1, 0 <= beta1 < 1)
    require("beta2", "in [0, 1)", beta2, 0 <= beta2 < 1)
    require("eps", "at least 0", eps, eps >= 0)
    require("weight_decay", "at least 0", weight_decay, weight_decay >= 0)
    require("step", "at least 1", step, step >= 1)
    mass, masses = take_masses(param, mass, messages, masses)
    torch.ops.pyparallel.adamw_step_(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        as_scalar("lr", lr, param),
        beta1,
        beta2,
        eps,
        weight_decay,
        as_scalar("step", step, param),
        maximize,
        mass,
        list(messages),
        masses,
        as_scalar("horizon", horizon, param),
        prediction,
        message,
    )
