"""Scalars as kernel arguments and on the device: the same to a kernel."""

import numpy as np
import torch

from pyparallel.kernels._scalars import argument
from pyparallel.kernels.predict_sgd import BLOCK, OPTIONS, _predict_sgd_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def predict(scale):
    generator = torch.Generator().manual_seed(0)
    param, momentum = (torch.randn(1003, generator=generator).to(DEVICE) for _ in range(2))
    out = torch.empty_like(param)
    with np.errstate(all="ignore"):  # numpy in the interpreter warns of inf and nan
        _predict_sgd_kernel[(1,)](param, momentum, scale, out, 1003, BLOCK=BLOCK, **OPTIONS)
    return out.view(torch.int32)


def test_both_have_the_same_bits():
    for number in (0.0, 0.1, -1 / 3, 1e-40, 3e38, 1e300, float("nan")):
        scale = torch.tensor(number, dtype=torch.float64)
        sent = argument(scale)
        assert isinstance(sent, float)
        assert torch.equal(predict(sent), predict(scale.float().to(DEVICE))), f"{number}"
