"""``adamw_step_``: AdamW fused with gossip averaging before and prediction after the step."""

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
    """Compute the op in plain PyTorch: the definition that all kernels are tested against.

    The update is ``predict_adam`` one step ahead. On the numerator ``mass * param`` the decay is
    the same factor, and the update is that of learning rate ``lr / mass``.
    """
    z = mixed(param, mass, messages, masses) * (1 - lr * weight_decay).float()
    gradient = -grad.float() if maximize else grad.float()
    mean, square = exp_avg.float(), exp_avg_sq.float()
    # Interpolate from the nearer operand: with beta1 = 0 the average is exactly the gradient.
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
    """Take a step of AdamW in place, with messages mixed in before and results emitted after.

    1. ``messages`` are averaged into ``param``, as ``mix_`` does with ``mass`` and ``masses``.
    2. AdamW (Loshchilov & Hutter, arXiv 1711.05101) steps on the numerator ``mass * param`` of
       PushSum, as Stochastic Gradient Push does (Assran et al., arXiv 1811.10792): decoupled decay
       ``param *= 1 - lr * weight_decay`` is scale-free, and the update is
       ``param -= lr / mass * m_hat / (sqrt(v_hat) + eps)``. With mass 1 it is the plain step.
    3. ``message`` gets the new ``param``, to be sent next.
    4. ``prediction`` gets ``predict_adam`` of the new ``param`` and moments with the learning rate
       ``lr / mass``.

    With fp32 parameters this equals ``mix_``, the step, a copy and ``predict_adam`` in sequence,
    bit for bit; 16-bit parameters are rounded once, not twice. Every operation rounds, so that all
    implementations agree; torch's fused kernels contract some into multiply-adds, different ones on
    the CPU and on GPUs, and agree to one or two roundings. AMSGrad is not supported.

    Args:
        param: (n,) float32, bfloat16 or float16: the de-biased parameters. Written.
        grad: (n,) in one of these dtypes.
        exp_avg: (n,) in one of these dtypes: the first moment, zero before the first step. Written.
        exp_avg_sq: (n,) in exp_avg's dtype: the second moment, zero before the first step. Written.
        lr: learning rate, at least 0; a number, or a 0-d tensor on the cpu or param's device.
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        eps: added to the denominator, at least 0.
        weight_decay: at least 0.
        step: index of this step, 1 for the first; a number or a tensor like lr.
        maximize: maximize the objective instead of minimizing it.
        mass: 0-d float64 on param's device: the rank's own PushSum mass; the messages' masses are
            added to it. None: 1.
        messages: k tensors (n,), all of one of these dtypes: received de-biased parameters.
        masses: (k,) float64 on param's device: the mass of each message.
        horizon: how many steps ahead to predict, at least 0; a number or a tensor like lr.
        prediction: (n,) in one of these dtypes, written.
        message: (n,) in one of these dtypes, written.

    Raises:
        ValueError: a tensor of another shape, dtype, device or layout; a number out of range; an
            output that overlaps another buffer; on the CPU also masses below 0 or without a
            positive sum (not checked elsewhere, to avoid a host synchronization).
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
