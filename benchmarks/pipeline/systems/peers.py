"""The schedules of ``torch.distributed.pipelining`` as systems of the benchmarks."""

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from benchmarks.pipeline.models import LossFunction, Model, build_stages
from benchmarks.pipeline.systems import make_optimizer
from pyparallel.pipeline import Action, Kind
from pyparallel.planning.pipelines import read_csv


@dataclass(frozen=True)
class TorchSchedule:
    """One of torch's schedules, with AdamW on all stages, which updates once per step."""

    schedule: str  # its name in ``torch.distributed.pipelining.schedules``
    stages_per_rank: int = 1  # more than one for schedules that need it
    in_v: bool = False  # the second stages are assigned to ranks in reverse order
    microbatches_per_stage: int = 0  # the minimum that the schedule needs

    @property
    def name(self) -> str:
        return f"torch {self.schedule.removeprefix('Schedule')}"

    def stages(self, rank: int, num_ranks: int) -> list[int]:
        if self.in_v:
            return [rank, 2 * num_ranks - 1 - rank]
        return list(range(rank, num_ranks * self.stages_per_rank, num_ranks))

    def runs(self, num_ranks: int, num_microbatches: int) -> bool:
        return num_microbatches >= num_ranks * self.stages_per_rank * self.microbatches_per_stage

    def start(self, model: Model, num_microbatches: int) -> "TorchTraining":
        modules = build_stages(model, dist.get_world_size() * self.stages_per_rank)
        training = TorchTraining(self, modules, model.loss, num_microbatches)
        training.batch = model.make_batch(num_microbatches)
        return training


class TorchTraining:
    """Training with one schedule, by default with an AdamW for each module of this rank."""

    batch: tuple[Tensor, Tensor]

    def __init__(
        self,
        system: TorchSchedule,
        modules: Sequence[nn.Module],
        loss: LossFunction,
        num_microbatches: int,
        make_optimizers: Callable[[list[nn.Module]], list[torch.optim.Optimizer]] | None = None,
    ) -> None:
        self.own = system.stages(dist.get_rank(), dist.get_world_size())
        cpu, num_stages = torch.device("cpu"), len(modules)
        self.stages = [PipelineStage(modules[each], each, num_stages, cpu) for each in self.own]
        kind = getattr(schedules, system.schedule)
        held: Any = self.stages[0] if issubclass(kind, PipelineScheduleSingle) else self.stages
        self._num_microbatches = num_microbatches
        self._schedule = kind(held, num_microbatches, loss_fn=loss)
        mine = [modules[each] for each in self.own]
        make = make_optimizers or (lambda own: [make_optimizer(each.parameters()) for each in own])
        self.optimizers = make(mine)
        self._is_first, self._is_last = 0 in self.own, num_stages - 1 in self.own

    def step(self) -> float | None:
        """Step on the batch; return the mean loss on the rank of the last stage, else None."""
        inputs, target = self.batch
        losses: list[Tensor] | None = [] if self._is_last else None
        self._schedule.step(
            *([inputs] if self._is_first else []),
            target=target if self._is_last else None,
            losses=losses,
            return_outputs=False,
        )
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
        return [
            [
                action._replace(microbatch=action.microbatch + step * self._num_microbatches)
                for step in range(steps)
                for action in rank
            ]
            for rank in read_order(self._schedule.pipeline_order)
        ]


def read_order(order: Mapping[int, Sequence[Any]]) -> list[list[Action]]:
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
ZERO_BUBBLE = TorchSchedule("ScheduleInterleavedZeroBubble", stages_per_rank=2)
PEERS = [
    GPIPE,
    ONE_FORWARD_ONE_BACKWARD,
    TorchSchedule("ScheduleInterleaved1F1B", stages_per_rank=2),
    ZERO_BUBBLE,
    TorchSchedule("ScheduleZBVZeroBubble", stages_per_rank=2, in_v=True),
]
DEEP_PEERS = [
    *PEERS,
    TorchSchedule("ScheduleLoopedBFS", stages_per_rank=2),
    TorchSchedule("ScheduleDualPipeV", 2, in_v=True, microbatches_per_stage=1),
]
