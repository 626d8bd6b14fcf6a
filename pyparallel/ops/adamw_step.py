"""``adamw_step_``: AdamW fused with gossip averaging before and prediction after the step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._checks import Number, as_scalar, check_at_least
from ._library import checked, define
from ._step import Shared, check_step, mixed, placed, settle
from .predict_adam import check_adam, predict_adam_reference


def adamw_step_reference(
    param: Tensor,
    grads: list[Tensor],
    offsets: list[int],
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: Tensor,
    decoupled: bool,
    maximize: bool,
    *rest: Any,
) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against.

    The update is ``predict_adam`` one step ahead. On the numerator ``mass * param`` decoupled
    decay is the same factor, Adam's is that of ``weight_decay * mass``, and the update is that of
    learning rate ``lr / mass``.
    """
    shared = Shared(*rest)
    z = mixed(param, shared, after=False)
    gradient, stepped = placed(grads, offsets, param, maximize, shared)
    if not decoupled:
        gradient = gradient + (weight_decay * shared.mass).float() * z
    mean, square = exp_avg.float(), exp_avg_sq.float()
    # Interpolate from the nearer operand: with beta1 = 0 the average is exactly the gradient.
    near = 1 - beta1 < 0.5
    base, pull = (mean, 1 - beta1) if near else (gradient, -beta1)
    mean = base + pull * (gradient - mean)
    square = beta2 * square + (1 - beta2) * gradient * gradient
    decayed = z * (1 - lr * weight_decay).float() if decoupled else z
    rates, ahead = (lr / shared.mass, beta1, beta2, eps), torch.empty_like(z)
    predict_adam_reference(decayed, mean, square, *rates, step, torch.ones_like(step), ahead)
    exp_avg.copy_(torch.where(stepped, mean, exp_avg))
    exp_avg_sq.copy_(torch.where(stepped, square, exp_avg_sq))
    z = torch.where(stepped, ahead, z)
    settle(param, z, shared)
    if shared.prediction is not None:
        if shared.found_inf is not None:  # the moments are those of the step before
            is_taken = shared.found_inf.to(step.device) == 0
            step = torch.where(is_taken, step, (step - 1).clamp(min=1))
        rates = (lr / shared.mass, beta1, beta2, eps)
        predict_adam_reference(
            param, exp_avg, exp_avg_sq, *rates, step, shared.horizon, shared.prediction
        )


adamw_step_unchecked = define(
    "adamw_step_(Tensor(a!) param, Tensor[] grads, int[] offsets, Tensor(b!) exp_avg, "
    "Tensor(c!) exp_avg_sq, Tensor lr, float beta1, float beta2, float eps, float weight_decay, "
    "Tensor step, bool decoupled, bool maximize, Tensor(d!) mass, Tensor[] messages, "
    "Tensor masses, bool mix_after, Tensor? grad_scale, Tensor? found_inf, "
    "Tensor(e!)? nonfinite, Tensor horizon, Tensor(f!)? prediction, Tensor(g!)? message) -> ()",
    adamw_step_reference,
)
_adamw_step_checked = checked(adamw_step_unchecked)


def adamw_step_(
    param: Tensor,
    grad: Tensor | Sequence[Tensor],
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: Number,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: Number,
    offsets: Sequence[int] | None = None,
    decoupled: bool = True,
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
    """Take a step of AdamW or Adam in place, with messages mixed in and results emitted.

    1. ``messages`` are averaged into ``param``, as ``mix_`` does with ``mass`` and ``masses``;
       with ``mix_after`` between 3 and 4.
    2. AdamW (Loshchilov & Hutter, arXiv 1711.05101) steps on the numerator ``mass * param`` of
       PushSum, as Stochastic Gradient Push does (Assran et al., arXiv 1811.10792). Decoupled decay
       ``param *= 1 - lr * weight_decay`` is scale-free, and the update is
       ``param -= lr / mass * m_hat / (sqrt(v_hat) + eps)``. With ``decoupled=False`` it is Adam
       (Kingma & Ba, arXiv 1412.6980): decay adds ``weight_decay * mass * param`` to the gradient.
       With mass 1 it is the plain step.
    3. ``message`` gets the new ``param``, to be sent next.
    4. ``prediction`` gets ``predict_adam`` of the new ``param`` and moments with the learning rate
       ``lr / mass``.

    Elements that no gradient covers are not stepped: they do not decay, and their moments stay.
    They are mixed, sent and predicted like all others. With ``nonfinite`` the same holds for
    elements with a gradient that is not finite; with ``found_inf`` nothing is stepped, and nothing
    counted.

    With fp32 parameters this equals ``mix_``, the step, a copy and ``predict_adam`` in sequence,
    bit for bit; 16-bit parameters are rounded once, not twice. Every operation rounds, so that all
    implementations agree; torch's fused kernels contract some into multiply-adds, different ones on
    the CPU and on GPUs, and agree to one or two roundings. AMSGrad is not supported.

    Args:
        param: (n,) float32, bfloat16 or float16: the de-biased parameters. Written.
        grad: (n,) in one of these dtypes; or any number of contiguous tensors of any shapes, all
            of one of these dtypes, with ``offsets``.
        exp_avg: (n,) in one of these dtypes: the first moment, zero before the first step. Written.
        exp_avg_sq: (n,) in exp_avg's dtype: the second moment, zero before the first step. Written.
        lr: learning rate, at least 0; a number, or a 0-d tensor on the cpu or param's device.
        beta1, beta2: decays of the two moments, in [0, 1).
        eps: added to the denominator, at least 0.
        weight_decay: at least 0.
        step: index of this step, 1 for the first; a number or a tensor like lr.
        offsets: where in param each gradient begins, ascending without overlap.
        decoupled: AdamW's weight decay; False: Adam's.
        mass: 0-d float64 on param's device: the rank's own PushSum mass; the messages' masses are
            added to it. None: 1.
        messages: k tensors (n,), all of one of these dtypes: received de-biased parameters.
        masses: (k,) float64 on param's device: the mass of each message; one of mass 0 is not mixed
            in, whatever it holds.
        mix_after: mix the messages in after the step: it has the mass before them, the prediction
            the mass with them, and ``message`` the stepped values that are not yet mixed.
        grad_scale: 0-d float32 on the cpu or param's device, not 0: what the gradients are divided
            by, as ``torch.amp.GradScaler`` does. They are not written. None: 1.
        found_inf: 0-d float32 on the cpu or param's device: if it is not 0, no element is stepped;
            ``step`` counts the one not taken, and the prediction has the step before.
        nonfinite: 0-d float64 on param's device: elements whose gradient, after ``grad_scale`` and
            before decay, is infinite or nan are not stepped, and their number is added to it. None:
            they are stepped like all others.
        horizon: how many steps ahead to predict, at least 0; a number or a tensor like lr.
        prediction: (n,) in one of these dtypes, written.
        message: (n,) in one of these dtypes, written.
    """
    others = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    mixing = mass, messages, masses, mix_after
    scaling, outputs = (grad_scale, found_inf, nonfinite), (horizon, prediction, message)
    grads, offsets, shared = check_step(param, grad, offsets, others, mixing, scaling, outputs)
    check_adam(exp_avg, exp_avg_sq, beta1, beta2, eps)
    check_at_least("lr", lr, 0)
    check_at_least("weight_decay", weight_decay, 0)
    check_at_least("step", step, 1)
    _adamw_step_checked(
        param,
        grads,
        offsets,
        exp_avg,
        exp_avg_sq,
        as_scalar("lr", lr, param),
        beta1,
        beta2,
        eps,
        weight_decay,
        as_scalar("step", step, param),
        decoupled,
        maximize,
        *shared,
    )
