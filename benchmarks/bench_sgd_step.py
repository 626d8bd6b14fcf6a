"""``sgd_step_`` against torch's fused and foreach SGD, alone and followed by our other ops.

The peers are torch's functional ops, which cost less per call than the optimizer object. Where a
prediction is made, the step that comes without one is a peer too: how nearly free is it?
"""

from collections.abc import Iterator

import torch
from torch.optim.sgd import sgd

from benchmarks.harness import Case, Provider
from pyparallel.ops import mix_, predict_sgd, sgd_step_

SGD = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.01}
HORIZON = 3


def cases(device: str, sizes: list[int]) -> Iterator[Case]:
    """All cases at all sizes."""
    for numel in sizes:
        yield step_alone(device, numel)
        for out_dtype in (torch.float32, torch.bfloat16):
            yield step_and_prediction(device, numel, out_dtype)
        yield all_in_one(device, numel)


class Buffers:
    """One parameter with its gradient and velocity, and the steps that serve as peers."""

    def __init__(self, device: str, numel: int) -> None:
        self.all = tuple(torch.randn(numel, device=device) for _ in range(3))
        self.param, self.grad, self.velocity = self.all
        self.lists = [[tensor] for tensor in self.all]

    def ours(self, **around) -> None:
        """The step under test."""
        sgd_step_(*self.all, **SGD, **around)

    def torch_fused(self) -> None:
        """Torch's one kernel (on CPUs one loop) a step."""
        flags = {"dampening": 0.0, "nesterov": False, "maximize": False, "is_first_step": False}
        torch._fused_sgd_(*self.lists, **SGD, **flags)

    def torch_foreach(self) -> None:
        """Torch's separate ops."""
        flags = {"dampening": 0.0, "nesterov": False, "maximize": False}
        sgd(*self.lists, foreach=True, **SGD, **flags)

    def predict(self, out: torch.Tensor) -> None:
        """Our prediction as an op of its own."""
        predict_sgd(self.param, self.velocity, lr=SGD["lr"], horizon=HORIZON, out=out)


def step_alone(device: str, numel: int) -> Case:
    buffers = Buffers(device, numel)
    providers = [
        Provider("pyparallel", buffers.ours),
        Provider("torch fused", buffers.torch_fused),
        Provider("torch foreach", buffers.torch_foreach),
    ]
    return Case("sgd_step", "step", numel, 20 * numel, providers, device)


def step_and_prediction(device: str, numel: int, out_dtype: torch.dtype) -> Case:
    buffers = Buffers(device, numel)
    out = torch.empty(numel, device=device, dtype=out_dtype)

    def separate() -> None:
        buffers.torch_fused()
        buffers.predict(out)

    providers = [
        Provider("pyparallel", lambda: buffers.ours(horizon=HORIZON, prediction=out)),
        Provider("torch fused, predict_sgd", separate),
        Provider("torch fused, no prediction", buffers.torch_fused),
    ]
    name = f"step + {str(out_dtype).removeprefix('torch.')} ahead"
    return Case("sgd_step", name, numel, (20 + out_dtype.itemsize) * numel, providers, device)


def all_in_one(device: str, numel: int) -> Case:
    """A message in, one out and a prediction, all three bfloat16; then 26 bytes an element."""
    buffers = Buffers(device, numel)
    incoming, message, prediction = (torch.randn(numel, device=device).bfloat16() for _ in range(3))
    kept = torch.tensor(0.5, dtype=torch.float64, device=device)
    mass = kept.clone()
    masses = torch.full((1,), 0.5, dtype=torch.float64, device=device)

    def ours() -> None:
        mass.copy_(kept)
        around = {"mass": mass, "messages": [incoming], "masses": masses}
        buffers.ours(**around, horizon=HORIZON, prediction=prediction, message=message)

    def separate_with(step) -> None:
        mass.copy_(kept)
        mix_(buffers.param, mass, [incoming], masses)
        step()
        message.copy_(buffers.param)
        buffers.predict(prediction)

    providers = [
        Provider("pyparallel", ours),
        Provider("mix_, ours, copy_, predict", lambda: separate_with(buffers.ours)),
        Provider("mix_, fused, copy_, predict", lambda: separate_with(buffers.torch_fused)),
    ]
    return Case("sgd_step", "all in one", numel, 26 * numel, providers, device)
