"""``predict_sgd``: weights predicted a number of steps of SGD with momentum ahead."""

import torch
from torch import Tensor

from ._checks import Number, as_scalar, check_at_least, check_buffer, check_like
from ._library import checked, define


def predict_sgd_reference(
    param: Tensor, momentum_buffer: Tensor, lr: Tensor, horizon: Tensor, out: Tensor
) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against."""
    scale = (lr * horizon).float()
    out.copy_(param.float() - scale * momentum_buffer.float())


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
        param: (n,) float32, bfloat16 or float16.
        momentum_buffer: (n,) in one of these dtypes: the optimizer's velocity.
        lr: learning rate; a number, or a 0-d tensor on the cpu or param's device.
        horizon: number of steps ahead, at least 0; a number or a tensor like lr.
        out: (n,) in one of these dtypes, written and returned; None: a new tensor like param.
    """
    check_buffer("param", param)
    check_like("momentum_buffer", momentum_buffer, "param", param)
    check_at_least("horizon", horizon, 0)
    scalars = as_scalar("lr", lr, param), as_scalar("horizon", horizon, param)
    if out is None:
        out = torch.empty_like(param)
    else:
        check_like("out", out, "param", param)
    _predict_sgd_checked(param, momentum_buffer, *scalars, out)
    return out
