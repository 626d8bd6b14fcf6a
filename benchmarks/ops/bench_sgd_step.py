"""``sgd_step_`` against torch's fused and foreach SGD, alone and followed by our other ops."""

import torch
from torch.optim.sgd import sgd

from benchmarks.ops import steps
from benchmarks.ops.steps import HORIZON, StepCases
from pyparallel.ops import predict_sgd, sgd_step_

SGD = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.01}
FLAGS = {"dampening": 0.0, "nesterov": False, "maximize": False}


class Buffers(steps.Buffers):
    """Those of SGD with momentum."""

    def __init__(self, device: str, numel: int, num_gradients: int) -> None:
        tensors = [torch.randn(numel, device=device) for _ in range(3)]
        super().__init__(tensors, num_gradients)
        self.velocity = tensors[2]

    def ours(self, **around) -> None:
        sgd_step_(self.param, **self.gradients, momentum_buffer=self.velocity, **SGD, **around)

    def torch_fused(self) -> None:
        torch._fused_sgd_(*self.lists, **SGD, **FLAGS, is_first_step=False)

    def torch_foreach(self) -> None:
        sgd(*self.lists, foreach=True, **SGD, **FLAGS)

    def predict(self, out: torch.Tensor) -> None:
        predict_sgd(self.param, self.velocity, lr=SGD["lr"], horizon=HORIZON, out=out)


cases = StepCases("sgd_step", "predict_sgd", 20, Buffers).at
