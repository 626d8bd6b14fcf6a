"""Our schedules as systems of the benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from benchmarks.pipeline.models import Model
from benchmarks.pipeline.systems import ADAMW, make_optimizer
from pyparallel import pipeline


@dataclass(frozen=True)
class OurSchedule:
    """PipelineTrainer with one of its schedules, and AdamW on all stages."""

    schedule: pipeline.Schedule
    stages_per_rank: int = 1
    optimizer: str = ADAMW

    @property
    def name(self) -> str:
        more = ", 2 stages a rank" if self.stages_per_rank > 1 else ""
        if isinstance(self.schedule, pipeline.Interlocking):
            more = f", window {self.schedule.window}"
        return f"{type(self.schedule).__name__}{more}"

    def start(self, model: Model, num_microbatches: int) -> "OurTraining":
        return OurTraining(self, model, num_microbatches)


class OurTraining:
    """Training with one trainer."""

    def __init__(self, system: OurSchedule, model: Model, num_microbatches: int) -> None:
        num_ranks = dist.get_world_size()
        num_stages = num_ranks * system.stages_per_rank
        inputs, target = model.make_batch(num_microbatches)
        self._actions = partial(system.schedule.actions, num_stages, num_microbatches, num_ranks)
        # The target is on all ranks: heads need it too.
        self._batch = (inputs if dist.get_rank() == 0 else None), target
        self.trainer = pipeline.PipelineTrainer(
            model.build(),
            model.loss,
            partial(make_optimizer, kind=system.optimizer),
            system.schedule,
            num_microbatches=num_microbatches,
            split=model.split(num_stages),
        )

    def step(self) -> float:
        return self.trainer.step(*self._batch)

    def finish(self) -> None:
        self.trainer.flush()

    def weight_copies(self) -> list[int]:
        return self.trainer.peak_weight_copies

    def actions(self, steps: int) -> Sequence[Sequence[pipeline.Action]]:
        return self._actions(steps=steps)


GPIPE = OurSchedule(pipeline.GPipe())
ONE_FORWARD_ONE_BACKWARD = OurSchedule(pipeline.OneForwardOneBackward())
PIPE_DREAM = OurSchedule(pipeline.PipeDream())
PIPE_OPTIM = OurSchedule(pipeline.PipeOptim())
OURS = [
    GPIPE,
    ONE_FORWARD_ONE_BACKWARD,
    OurSchedule(pipeline.Interleaved(), stages_per_rank=2),
    OurSchedule(pipeline.ZeroBubble()),
    OurSchedule(pipeline.ZeroBubble(), stages_per_rank=2),
    PIPE_DREAM,
    OurSchedule(pipeline.PipeDream2BW()),
    PIPE_OPTIM,
]
