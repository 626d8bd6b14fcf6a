"""What no pipeline can beat: all stages at work at once, and nobody waits for anybody."""

import torch
import torch.distributed as dist
from torch import Tensor

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

    def pass_through(self) -> None:
        """Forward and backward of a microbatch, from no gradients to new ones."""
        self._inputs.grad = None
        self.stage.zero_grad()
        output = self.stage(self._inputs)
        if self._target is None:
            output.backward(self._gradient)
        else:
            self._loss(output, self._target).backward()


class Limit:
    """Each rank trains its stage alone, with an update a microbatch."""

    name = "no waiting, no messages"

    def start(self, model: Model, num_microbatches: int) -> "LimitTraining":
        """Begin on this rank."""
        return LimitTraining(StageAlone(model), num_microbatches)


class LimitTraining:
    """Forward, backward and update of one stage."""

    def __init__(self, alone: StageAlone, num_microbatches: int) -> None:
        self._alone = alone
        self._optimizer = make_optimizer(alone.stage.parameters())
        self._num_microbatches = num_microbatches

    def step(self) -> None:
        """As many microbatches as a call has."""
        for _ in range(self._num_microbatches):
            self._alone.pass_through()
            self._optimizer.step()

    def finish(self) -> None:
        """Nothing is under way."""
