"""``sgd_step_`` against torch's fused and foreach SGD, alone and followed by our other ops."""

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch.optim.sgd import sgd

from benchmarks.harness.measure import Case
from benchmarks.ops.steps import HORIZON, StepCases, in_parts
from pyparallel.ops import predict_sgd, sgd_step_

SGD = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.01}


def cases(device: str, sizes: list[int]) -> Iterator[Case]:
    return StepCases("sgd_step", "predict_sgd", 20, Buffers).at(device, sizes)


class Buffers:
    """One parameter with its gradient and velocity, and the peers' steps."""

    def __init__(self, device: str, numel: int, num_gradients: int) -> None:
        self.all = tuple(torch.randn(numel, device=device) for _ in range(3))
        self.param, self.grad, self.velocity = self.all
        self.lists = [in_parts(tensor, num_gradients) for tensor in self.all]
        self.lists[1] = grads = [part.clone() for part in self.lists[1]]
        ends = list(accumulate(map(len, grads)))
        self.gradients = {"grad": grads, "offsets": [0, *ends[:-1]]}

    def ours(self, **around) -> None:
        sgd_step_(self.param, **self.gradients, momentum_buffer=self.velocity, **SGD, **around)

    def torch_fused(self) -> None:
        flags = {"dampening": 0.0, "nesterov": False, "maximize": False, "is_first_step": False}
        torch._fused_sgd_(*self.lists, **SGD, **flags)

    def torch_foreach(self) -> None:
        flags = {"dampening": 0.0, "nesterov": False, "maximize": False}
        sgd(*self.lists, foreach=True, **SGD, **flags)

    def predict(self, out: torch.Tensor) -> None:
        predict_sgd(self.param, self.velocity, lr=SGD["lr"], horizon=HORIZON, out=out)
