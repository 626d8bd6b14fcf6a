"""The schedules of ``torch.distributed.pipelining`` as systems of the benchmarks."""

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from benchmarks.pipeline.models import Model, build_stages
from benchmarks.pipeline.systems import make_optimizer
from pyparallel.pipeline import Action, Kind, read_csv


@dataclass(frozen=True)
class TorchSchedule:
    """One of torch's schedules, with AdamW on all stages, which updates once per step.

    Args:
        schedule: its name in ``torch.distributed.pipelining.schedules``.
        stages_per_rank: more than one for schedules that need it.
        in_v: the second stages are assigned to ranks in reverse order.
        microbatches_per_stage: the minimum that the schedule needs.
    """

    schedule: str
    stages_per_rank: int = 1
    in_v: bool = False
    microbatches_per_stage: int = 0

    @property
    def name(self) -> str:
        """Return the name in tables."""
        return f"torch {self.schedule.removeprefix('Schedule')}"

    def stages(self, rank: int, num_ranks: int) -> list[int]:
        """Return the stages of a rank, ascending."""
        if self.in_v:
            return [rank, 2 * num_ranks - 1 - rank]
        return list(range(rank, num_ranks * self.stages_per_rank, num_ranks))

    def runs(self, num_ranks: int, num_microbatches: int) -> bool:
        """Return whether the schedule can run with so few microbatches."""
        return num_microbatches >= num_ranks * self.stages_per_rank * self.microbatches_per_stage

    def start(self, model: Model, num_microbatches: int) -> "TorchTraining":
        """Start training on this rank."""
        return TorchTraining(self, model, num_microbatches)


class TorchTraining:
    """Training with one schedule."""

    def __init__(self, system: TorchSchedule, model: Model, num_microbatches: int) -> None:
        num_ranks = dist.get_world_size()
        num_stages = num_ranks * system.stages_per_rank
        mine = system.stages(dist.get_rank(), num_ranks)
        modules = build_stages(model, num_stages)
        self.stages = [
            PipelineStage(modules[index], index, num_stages, torch.device("cpu")) for index in mine
        ]
        kind = getattr(schedules, system.schedule)
        self._num_microbatches = num_microbatches
        held: Any = self.stages
        if issubclass(kind, PipelineScheduleSingle):
            held = self.stages[0]
        self._schedule = kind(held, num_microbatches, loss_fn=model.loss)
        self.optimizers = [make_optimizer(modules[index].parameters()) for index in mine]
        inputs, target = model.make_batch(num_microbatches)
        self._inputs = (inputs,) if 0 in mine else ()
        self._target = target if num_stages - 1 in mine else None

    def step(self) -> float | None:
        """Step; return the mean loss on the rank of the last stage, else None."""
        losses: list[torch.Tensor] | None = None if self._target is None else []
        self._schedule.step(*self._inputs, target=self._target, losses=losses, return_outputs=False)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return None if losses is None else float(torch.stack(losses).detach().mean())

    def finish(self) -> None:
        """Do nothing: the pipeline is empty after each step."""

    def weight_copies(self) -> list[int]:
        """Return no counts: the pipeline is empty at each update."""
        return []

    def actions(self, steps: int) -> list[list[Action]]:
        """Return the actions of all ranks in ``steps`` steps."""
        once = read_order(self._schedule.pipeline_order)
        return [
            [
                action._replace(microbatch=action.microbatch + step * self._num_microbatches)
                for step in range(steps)
                for action in rank
            ]
            for rank in once
        ]


def read_order(order: Mapping[int, Sequence[Any]]) -> list[list[Action]]:
    """Return torch's order of the computations, by rank."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "order.csv")
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(order[rank] for rank in sorted(order))
        return [list(number_forwards(rank)) for rank in read_csv(path)]


def number_forwards(actions: Iterable[Action]) -> Iterator[Action]:
    """Number the forwards of each stage in their order.

    Torch runs them in this order, but its ``pipeline_order`` of 1F1B starts at 1 on the last stage.
    """
    count: Counter[int] = Counter()
    for action in actions:
        if action.kind is Kind.FORWARD:
            yield action._replace(microbatch=count[action.stage])
            count[action.stage] += 1
        else:
            yield action


GPIPE = TorchSchedule("ScheduleGPipe")
ONE_FORWARD_ONE_BACKWARD = TorchSchedule("Schedule1F1B")
INTERLEAVED = TorchSchedule("ScheduleInterleaved1F1B", stages_per_rank=2)
ZERO_BUBBLE = TorchSchedule("ScheduleInterleavedZeroBubble", stages_per_rank=2)
ZERO_BUBBLE_V = TorchSchedule("ScheduleZBVZeroBubble", stages_per_rank=2, in_v=True)
LOOPED = TorchSchedule("ScheduleLoopedBFS", stages_per_rank=2)
DUAL_PIPE_V = TorchSchedule("ScheduleDualPipeV", 2, in_v=True, microbatches_per_stage=1)
PEERS = [GPIPE, ONE_FORWARD_ONE_BACKWARD, INTERLEAVED, ZERO_BUBBLE, ZERO_BUBBLE_V]
DEEP_PEERS = [*PEERS, LOOPED, DUAL_PIPE_V]
