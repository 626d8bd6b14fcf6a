"""Properties of every op that follow from how ops are defined."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pyparallel import ops


def numbers(count):
    return torch.randn(count, generator=torch.Generator().manual_seed(count))


def double(*shape):
    return torch.ones(shape, dtype=torch.float64)


def steps():
    return {"lr": 0.1, "horizon": 1, "prediction": torch.empty(64)}


# Each writes its first argument, a tensor of 64 numbers.
WRITERS = {
    "mix_": lambda z: ops.mix_(z, double(), [numbers(64)], double(1)),
    "mix_quantized_": lambda z: ops.mix_quantized_(
        z, double(), *([part] for part in ops.quantize(numbers(64), bits=8)), double(1), bits=8
    ),
    "scatter_add_": lambda dense: ops.scatter_add_(dense, numbers(2), torch.tensor([3, 9])),
    "sgd_step_": lambda param: ops.sgd_step_(param, numbers(64), torch.zeros(64), **steps()),
    "adamw_step_": lambda param: ops.adamw_step_(
        param, numbers(64), torch.zeros(64), torch.zeros(64), beta1=0.9, beta2=0.9, eps=1e-8,
        weight_decay=0.0, step=1, **steps(),
    ),
    "orthogonalize_": lambda matrix: ops.orthogonalize_([matrix.view(16, 4)]),
    "predict_sgd": lambda out: ops.predict_sgd(
        numbers(64), numbers(64), lr=0.1, horizon=1, out=out
    ),
    "quantize": lambda residual: ops.quantize(numbers(64), bits=8, residual=residual),
    "dequantize": lambda out: ops.dequantize(
        *ops.quantize(numbers(64), bits=8), bits=8, numel=64, out=out
    ),
    "pack_signs": lambda residual: ops.pack_signs(numbers(64), residual=residual),
    "unpack_signs": lambda out: ops.unpack_signs(*ops.pack_signs(numbers(64)), numel=64, out=out),
    "top_k": lambda residual: ops.top_k(numbers(64), 5, residual=residual),
    "random_k": lambda residual: ops.random_k(numbers(64), 5, seed=1, residual=residual),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
def test_autograd_refuses_what_an_op_has_overwritten(name):
    parameter = torch.ones(64, requires_grad=True)
    saved = parameter * 2
    loss = saved.square().sum()
    before = saved._version
    with torch.no_grad():
        WRITERS[name](saved)
    assert saved._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ["mix_", "sgd_step_", "adamw_step_"])
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_tensors_without_values_are_accepted(name, kind):
    # Tracing has only shapes: values and addresses must not be read.
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        arguments = {
            "mix_": (torch.empty(64), double(), [torch.empty(64)], double(1)),
            "sgd_step_": [torch.empty(64) for _ in range(3)],
            "adamw_step_": [torch.empty(64) for _ in range(4)],
        }[name]
        options = {
            "mix_": {},
            "sgd_step_": steps(),
            "adamw_step_": {
                "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "step": 1, **steps(),
            },
        }[name]  # fmt: skip
        getattr(ops, name)(*arguments, **options)
