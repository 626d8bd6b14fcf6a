"""Benchmark cases shared by the optimizer steps: alone, with a prediction, all in one pass.

Ours takes one gradient or many, each in memory of its own; torch as many tensors of each kind.

The peers are torch's functional ops, which cost less per call than the optimizer object. Cases with
a prediction include the step without one as a peer, to show the prediction's cost.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from benchmarks.harness.measure import Case, Provider
from pyparallel.ops import mix_

HORIZON = 3
NUM_GRADIENTS = 36  # as many as parameters of three layers of a transformer


def in_parts(tensor: Tensor, count: int) -> list[Tensor]:
    """Return views of about the same length, of whole cache lines as parameters mostly are."""
    return list(tensor.split(max(16, -(-tensor.numel() // count // 16) * 16)))


class Buffers:
    """One parameter with its gradient and state, and the operations of an optimizer on them.

    ``ours(**around)`` takes the step under test, ``torch_fused()`` torch's fused kernel (one
    loop on CPUs), ``torch_foreach()`` torch's separate ops, and ``predict(out)`` predicts
    HORIZON steps ahead with our separate op.

    Args:
        tensors: parameter, gradient and states.
        num_gradients: parts of the gradient, each in memory of its own.
    """

    peers: Mapping[str, Callable[[], object]] = {}  # of other libraries, beside a step alone

    def __init__(self, tensors: Sequence[Tensor], num_gradients: int) -> None:
        self.param = tensors[0]
        self.lists = [in_parts(tensor, num_gradients) for tensor in tensors]
        self.lists[1] = grads = [part.clone() for part in self.lists[1]]
        ends = list(accumulate(map(len, grads)))
        self.gradients = {"grad": grads, "offsets": [0, *ends[:-1]]}


@dataclass(frozen=True)
class StepCases:
    """The cases of one optimizer's step."""

    op: str
    predict: str
    num_bytes: int  # minimum bytes per element moved by the step alone
    # Creates the fp32 buffers of a length, for a number of gradients
    make_buffers: Callable[[str, int, int], Buffers]

    def at(self, device: str, sizes: list[int]) -> Iterator[Case]:
        for numel in sizes:
            yield self.alone(device, numel)
            for out_dtype in (torch.float32, torch.bfloat16):
                yield self.and_prediction(device, numel, out_dtype)
            yield self.and_prediction(device, numel, torch.float32, NUM_GRADIENTS)
            yield self.all_in_one(device, numel)

    def alone(self, device: str, numel: int) -> Case:
        buffers = self.make_buffers(device, numel, 1)
        providers = [
            Provider("pyparallel", buffers.ours),
            Provider("torch fused", buffers.torch_fused),
            Provider("torch foreach", buffers.torch_foreach),
            *(Provider(name, run, captured=False) for name, run in buffers.peers.items()),
        ]
        return Case(self.op, "step", numel, self.num_bytes * numel, providers, device)

    def and_prediction(
        self, device: str, numel: int, out_dtype: torch.dtype, num_gradients: int = 1
    ) -> Case:
        buffers = self.make_buffers(device, numel, num_gradients)
        out = torch.empty(numel, device=device, dtype=out_dtype)

        def separate() -> None:
            buffers.torch_fused()
            buffers.predict(out)

        providers = [
            Provider("pyparallel", lambda: buffers.ours(horizon=HORIZON, prediction=out)),
            Provider(f"torch fused, {self.predict}", separate),
            Provider("torch fused, no prediction", buffers.torch_fused),
        ]
        name = f"step + {str(out_dtype).removeprefix('torch.')} ahead"
        if num_gradients > 1:
            name += f", {num_gradients} gradients"
        num_bytes = (self.num_bytes + out_dtype.itemsize) * numel
        return Case(self.op, name, numel, num_bytes, providers, device)

    def all_in_one(self, device: str, numel: int) -> Case:
        """Return the case with a bfloat16 message in, one out and a prediction: 6 bytes more."""
        buffers = self.make_buffers(device, numel, 1)
        incoming, message, prediction = (
            torch.randn(numel, device=device).bfloat16() for _ in range(3)
        )
        kept = torch.tensor(0.5, dtype=torch.float64, device=device)
        mass = kept.clone()
        masses = torch.full((1,), 0.5, dtype=torch.float64, device=device)

        def ours() -> None:
            mass.copy_(kept)
            around = {"mass": mass, "messages": [incoming], "masses": masses}
            buffers.ours(**around, horizon=HORIZON, prediction=prediction, message=message)

        def separate_with(step: Callable[[], None]) -> None:
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
        return Case(self.op, "all in one", numel, (self.num_bytes + 6) * numel, providers, device)
