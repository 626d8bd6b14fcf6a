"""``adamw_step_`` against torch's fused and foreach AdamW, alone and followed by our other ops."""

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch.optim.adamw import adamw

from benchmarks.harness.measure import Case
from benchmarks.ops.steps import HORIZON, StepCases, in_parts
from pyparallel.ops import adamw_step_, predict_adam

ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
DECAY, STEP = 0.01, 100


def cases(device: str, sizes: list[int]) -> Iterator[Case]:
    return StepCases("adamw_step", "predict_adam", 28, Buffers).at(device, sizes)


class Buffers:
    """One parameter with its gradient and moments, and the peers' steps."""

    def __init__(self, device: str, numel: int, num_gradients: int) -> None:
        self.param, self.grad, self.mean = (torch.randn(numel, device=device) for _ in range(3))
        self.square = torch.rand(numel, device=device)
        self.all = (self.param, self.grad, self.mean, self.square)
        self.lists = [in_parts(tensor, num_gradients) for tensor in self.all]
        self.lists[1] = grads = [part.clone() for part in self.lists[1]]
        ends = list(accumulate(map(len, grads)))
        self.gradients = {"grad": grads, "offsets": [0, *ends[:-1]]}
        self.steps = [torch.tensor(float(STEP), device=device) for _ in grads]
        self.counted = [torch.tensor(float(STEP)) for _ in grads]  # foreach increments its own

    def ours(self, **around) -> None:
        states = {"exp_avg": self.mean, "exp_avg_sq": self.square}
        numbers = {**ADAM, "weight_decay": DECAY, "step": STEP}
        adamw_step_(self.param, **self.gradients, **states, **numbers, **around)

    def torch_fused(self) -> None:
        flags = {"weight_decay": DECAY, "amsgrad": False, "maximize": False}
        torch._fused_adamw_(*self.lists, [], self.steps, **ADAM, **flags)

    def torch_foreach(self) -> None:
        flags = {"weight_decay": DECAY, "amsgrad": False, "maximize": False}
        adamw(*self.lists, [], self.counted, foreach=True, **ADAM, **flags)

    def predict(self, out: torch.Tensor) -> None:
        states = self.param, self.mean, self.square
        predict_adam(*states, **ADAM, step=STEP, horizon=HORIZON, out=out)
