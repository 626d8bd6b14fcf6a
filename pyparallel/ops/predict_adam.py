"""``predict_adam``: weights predicted a number of Adam steps ahead."""

import torch
from torch import Tensor

from . import _checks
from ._library import checked, define


def predict_adam_reference(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor,
    horizon: Tensor,
    out: Tensor,
) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against.

    Numerator and denominator are both multiplied by ``sqrt(1 - beta2**step)``, which saves a
    division per element; the scalars are computed in float64.
    """
    dtype = torch.promote_types(param.dtype, torch.float32)
    correction = (1 - beta2**step).sqrt()
    step_size = (lr * horizon / (1 - beta1**step) * correction).to(dtype)
    root = exp_avg_sq.double().sqrt().to(dtype)  # torch's float32 sqrt on the CPU errs by an ulp
    denominator = root + (eps * correction).to(dtype)
    out.copy_(param.to(dtype) - step_size * exp_avg.to(dtype) / denominator)


predict_adam_unchecked = define(
    "predict_adam(Tensor param, Tensor exp_avg, Tensor exp_avg_sq, Tensor lr, float beta1, "
    "float beta2, float eps, Tensor step, Tensor horizon, Tensor(a!) out) -> ()",
    predict_adam_reference,
)
_predict_adam_checked = checked(predict_adam_unchecked, in_place=True)


def predict_adam(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: _checks.Number,
    beta1: float,
    beta2: float,
    eps: float,
    step: _checks.Number,
    horizon: _checks.Number,
    out: Tensor | None = None,
) -> Tensor:
    """Predict weights ``horizon`` steps ahead along the current moments of Adam or AdamW.

    ``param - lr * horizon * m_hat / (sqrt(v_hat) + eps)``, with ``m_hat = exp_avg / (1 -
    beta1**step)`` and ``v_hat = exp_avg_sq / (1 - beta2**step)``: the rule of PipeOptim (Guan et
    al., arXiv 2312.00839), which omits weight decay.

    Args:
        param: (n,) float32, bfloat16 or float16; or float64 as all the others, by plain PyTorch.
        exp_avg: (n,) in one of these dtypes: the first moment.
        exp_avg_sq: (n,) in exp_avg's dtype: the second moment.
        lr: learning rate; a number, or a 0-d tensor on the cpu or param's device.
        beta1, beta2: decays of the two moments, in [0, 1).
        eps: added to the denominator, at least 0.
        step: number of steps the optimizer has taken, at least 1; a number or a tensor like lr.
        horizon: number of steps ahead, at least 0; a number or a tensor like lr.
        out: (n,) in one of these dtypes, written and returned; None: a new tensor like param.
    """
    is_wide = _checks.are_float64([param, exp_avg, exp_avg_sq, param if out is None else out])
    if not is_wide:
        _checks.check_buffer("param", param)
        _checks.check_all_like({"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}, (), "param", param)
    check_adam(exp_avg, exp_avg_sq, beta1, beta2, eps)
    _checks.check_at_least("step", step, 1)
    _checks.check_at_least("horizon", horizon, 0)
    lr = _checks.as_scalar("lr", lr, param)
    step = _checks.as_scalar("step", step, param)
    horizon = _checks.as_scalar("horizon", horizon, param)
    if out is None:
        out = torch.empty_like(param)
    elif not is_wide:
        _checks.check_like("out", out, "param", param)
    predict = predict_adam_reference if is_wide else _predict_adam_checked
    predict(param, exp_avg, exp_avg_sq, lr, beta1, beta2, eps, step, horizon, out)
    return out


def check_adam(exp_avg: Tensor, exp_avg_sq: Tensor, beta1: float, beta2: float, eps: float) -> None:
    """Raise on moments of different dtypes, and on numbers out of range."""
    if exp_avg.dtype != exp_avg_sq.dtype:
        _checks.check_one_dtype("exp_avg and exp_avg_sq", [exp_avg, exp_avg_sq])
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1 and eps >= 0):
        _checks.require("beta1", "in [0, 1)", beta1, 0 <= beta1 < 1)
        _checks.require("beta2", "in [0, 1)", beta2, 0 <= beta2 < 1)
        _checks.check_at_least("eps", eps, 0)
