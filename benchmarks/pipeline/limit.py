"""What no pipeline can beat: all stages at work at once, and nobody waits for anybody."""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pipeline.models import Model, cut
from benchmarks.pipeline.systems import make_optimizer


class StageAlone:
    """This rank's stage, on tensors of the shapes that the other stages would send."""

    def __init__(self, model: Model) -> None:
        stages, rank = cut(model, dist.get_world_size()), dist.get_rank()
        self.stage = stages[rank]
        self._loss = model.loss
        inputs, target = model.make_batch(1)
        with torch.no_grad():
            for stage in stages[:rank]:
                inputs = stage(inputs)
            self._gradient = torch.randn_like(self.stage(inputs))
        self._inputs = inputs.requires_grad_(rank > 0)
        self._target: Tensor | None = target if self.stage is stages[-1] else None

    def forward(self) -> Tensor:
        """Of one microbatch: the output, or the loss of the last stage."""
        output: Tensor = self.stage(self._inputs)
        return output if self._target is None else self._loss(output, self._target)

    def backward(self, output: Tensor) -> None:
        """From no gradients to new ones."""
        self._inputs.grad = None
        self.stage.zero_grad()
        output.backward(self._gradient if self._target is None else None)


class Limit:
    """Each rank trains its stage alone, with an update a microbatch.

    A stage is as many microbatches ahead with its forwards as in a pipeline: their activations take
    room in the caches.
    """

    name = "no waiting, no messages"

    def start(self, model: Model, num_microbatches: int) -> "LimitTraining":
        """Begin on this rank."""
        ahead = dist.get_world_size() - 1 - dist.get_rank()
        return LimitTraining(StageAlone(model), ahead, num_microbatches)


class LimitTraining:
    """Forward, backward and update of one stage."""

    def __init__(self, alone: StageAlone, ahead: int, num_microbatches: int) -> None:
        self._alone = alone
        self._passing: deque[Tensor] = deque()
        self._ahead = ahead
        self._num_microbatches = num_microbatches
        # Of their own: an update between a forward and its backward would else be refused.
        self._weights = [nn.Parameter(each.data) for each in alone.stage.parameters()]
        self._optimizer = make_optimizer(self._weights)

    def step(self) -> None:
        """As many microbatches as a call has."""
        for _ in range(self._num_microbatches):
            self._passing.append(self._alone.forward())
            if len(self._passing) > self._ahead:
                self._alone.backward(self._passing.popleft())
                self._update()

    def finish(self) -> None:
        """The backwards that are owed."""
        while self._passing:
            self._alone.backward(self._passing.popleft())
            self._update()

    def _update(self) -> None:
        for weight, parameter in zip(self._weights, self._alone.stage.parameters(), strict=True):
            weight.grad = parameter.grad
        self._optimizer.step()
        for weight in self._weights:
            weight.grad = None
