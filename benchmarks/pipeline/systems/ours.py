"""Our schedules as systems of the benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from benchmarks.pipeline.models import Model
from benchmarks.pipeline.systems import ADAMW, make_optimizer
from pyparallel.pipeline import (
    Action,
    GPipe,
    Interleaved,
    OneForwardOneBackward,
    PipeDream,
    PipeDream2BW,
    PipelineTrainer,
    PipeOptim,
    Schedule,
    Span,
    ZeroBubble,
)
from pyparallel.pipeline.runtime.stage import Stage


@dataclass(frozen=True)
class OurSchedule:
    """PipelineTrainer with one of its schedules, and AdamW on all stages.

    Args:
        optimizer: the class of AdamW.
    """

    schedule: Schedule
    stages_per_rank: int = 1
    optimizer: str = ADAMW

    @property
    def name(self) -> str:
        """Return the name in tables."""
        more = ", 2 stages a rank" if self.stages_per_rank > 1 else ""
        return f"{type(self.schedule).__name__}{more}"

    def start(self, model: Model, num_microbatches: int) -> "OurTraining":
        """Start training on this rank."""
        return OurTraining(self, model, num_microbatches)


class OurTraining:
    """Training with one trainer."""

    def __init__(self, system: OurSchedule, model: Model, num_microbatches: int) -> None:
        num_ranks = dist.get_world_size()
        num_stages = num_ranks * system.stages_per_rank
        inputs, target = model.make_batch(num_microbatches)
        self._actions = partial(system.schedule.actions, num_stages, num_microbatches, num_ranks)
        self._inputs = inputs if dist.get_rank() == 0 else None
        self._target = target  # on all ranks: heads need it too
        self._trainer = PipelineTrainer(
            model.build(),
            model.loss,
            partial(make_optimizer, kind=system.optimizer),
            system.schedule,
            num_microbatches=num_microbatches,
            split=model.split(num_stages),
        )

    @property
    def stages(self) -> Sequence[Stage]:
        """Return the stages of this rank."""
        return self._trainer.stages

    @property
    def spans(self) -> Sequence[Span]:
        """Return the actions of this rank in the last step."""
        return self._trainer.spans

    def step(self) -> float | None:
        """Step; return the mean loss on the rank of the last stage, else None."""
        return self._trainer.step(self._inputs, self._target)

    def finish(self) -> None:
        """Flush the pipeline."""
        self._trainer.flush()

    def weight_copies(self) -> list[int]:
        """Return the peak number of weight copies of each stage of this rank."""
        return self._trainer.peak_weight_copies

    def actions(self, steps: int) -> Sequence[Sequence[Action]]:
        """Return the actions of all ranks in ``steps`` steps."""
        return self._actions(steps=steps)


GPIPE = OurSchedule(GPipe())
ONE_FORWARD_ONE_BACKWARD = OurSchedule(OneForwardOneBackward())
INTERLEAVED = OurSchedule(Interleaved(), stages_per_rank=2)
ZERO_BUBBLE = OurSchedule(ZeroBubble())
ZERO_BUBBLE_INTERLEAVED = OurSchedule(ZeroBubble(), stages_per_rank=2)
PIPE_DREAM = OurSchedule(PipeDream())
PIPE_DREAM_2BW = OurSchedule(PipeDream2BW())
PIPE_OPTIM = OurSchedule(PipeOptim())
OURS = [
    GPIPE,
    ONE_FORWARD_ONE_BACKWARD,
    INTERLEAVED,
    ZERO_BUBBLE,
    ZERO_BUBBLE_INTERLEAVED,
    PIPE_DREAM,
    PIPE_DREAM_2BW,
    PIPE_OPTIM,
]
