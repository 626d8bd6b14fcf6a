"""``predict_sgd``: weights predicted a number of steps of SGD with momentum ahead."""

import torch
from torch import Tensor

from ._checks import Number, are_float64, as_scalar, check_at_least, check_buffer, check_like
from ._library import checked, define


def predict_sgd_reference(
    param: Tensor, momentum_buffer: Tensor, lr: Tensor, horizon: Tensor, out: Tensor
) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against."""
    dtype = torch.promote_types(param.dtype, torch.float32)
    scale = (lr * horizon).to(dtype)
    out.copy_(param.to(dtype) - scale * momentum_buffer.to(dtype))


predict_sgd_unchecked = define(
    "predict_sgd(Tensor param, Tensor momentum_buffer, Tensor lr, Tensor horizon, "
    "Tensor(a!) out) -> ()",
    predict_sgd_reference,
)
_predict_sgd_checked = checked(predict_sgd_unchecked, in_place=True)


def predict_sgd(
    param: Tensor,
    momentum_buffer: Tensor,
    *,
    lr: Number,
    horizon: Number,
    out: Tensor | None = None,
) -> Tensor:
    """Predict weights ``horizon`` steps ahead: ``param - lr * horizon * momentum_buffer``.

    The rule of SpecTrain (Chen et al., arXiv 1809.02839) and PipeOptim (Guan et al., arXiv
    2312.00839), exact while the momentum buffer does not change.

    Args:
        param: (n,) float32, bfloat16 or float16; or float64 as all the others, by plain PyTorch.
        momentum_buffer: (n,) in one of these dtypes: the optimizer's velocity.
        lr: learning rate; a number, or a 0-d tensor on the cpu or param's device.
        horizon: number of steps ahead, at least 0; a number or a tensor like lr.
        out: (n,) in one of these dtypes, written and returned; None: a new tensor like param.
    """
    is_wide = are_float64([param, momentum_buffer, param if out is None else out])
    if not is_wide:
        check_buffer("param", param)
        check_like("momentum_buffer", momentum_buffer, "param", param)
    check_at_least("horizon", horizon, 0)
    scalars = as_scalar("lr", lr, param), as_scalar("horizon", horizon, param)
    if out is None:
        out = torch.empty_like(param)
    elif not is_wide:
        check_like("out", out, "param", param)
    (predict_sgd_reference if is_wide else _predict_sgd_checked)(
        param, momentum_buffer, *scalars, out
    )
    return out
