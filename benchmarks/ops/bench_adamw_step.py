"""``adamw_step_`` against torch's fused and foreach AdamW, alone and followed by our other ops.

On a GPU a step alone is beside FlashOptim's too, where that is installed.
"""

import functools
import importlib

import torch
from torch.optim.adamw import adamw

from benchmarks.ops import steps
from benchmarks.ops.steps import HORIZON, StepCases
from pyparallel.ops import adamw_step_, predict_adam

ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
STEP = 100
FLAGS = {"weight_decay": 0.01, "amsgrad": False, "maximize": False}


class Buffers(steps.Buffers):
    """Those of AdamW."""

    def __init__(self, device: str, numel: int, num_gradients: int) -> None:
        param, grad, self.mean = (torch.randn(numel, device=device) for _ in range(3))
        self.square = torch.rand(numel, device=device)
        super().__init__((param, grad, self.mean, self.square), num_gradients)
        grads = self.lists[1]
        self.steps = [torch.tensor(float(STEP), device=device) for _ in grads]
        self.counted = [torch.tensor(float(STEP)) for _ in grads]  # foreach increments its own
        if device == "cuda":
            self.peers = {"FlashAdamW, states of 8 bits": self.flash_step}

    def ours(self, **around) -> None:
        states = {"exp_avg": self.mean, "exp_avg_sq": self.square}
        numbers = {**ADAM, "weight_decay": FLAGS["weight_decay"], "step": STEP}
        adamw_step_(self.param, **self.gradients, **states, **numbers, **around)

    def torch_fused(self) -> None:
        torch._fused_adamw_(*self.lists, [], self.steps, **ADAM, **FLAGS)

    def torch_foreach(self) -> None:
        adamw(*self.lists, [], self.counted, foreach=True, **ADAM, **FLAGS)

    @functools.cached_property
    def flash(self) -> torch.optim.Optimizer:
        """FlashOptim's optimizer of one parameter: a ModuleNotFoundError where it is not."""
        param = torch.nn.Parameter(self.param.clone())
        param.grad = self.gradients["grad"][0]
        numbers = {"lr": ADAM["lr"], "betas": (ADAM["beta1"], ADAM["beta2"]), "eps": ADAM["eps"]}
        module = importlib.import_module("flashoptim")
        return module.FlashAdamW([param], **numbers, weight_decay=FLAGS["weight_decay"])

    def flash_step(self) -> None:
        self.flash.step()

    def predict(self, out: torch.Tensor) -> None:
        states = self.param, self.mean, self.square
        predict_adam(*states, **ADAM, step=STEP, horizon=HORIZON, out=out)


cases = StepCases("adamw_step", "predict_adam", 28, Buffers).at
