"""What train_pipeline.py remembers of its steps, and the timelines it makes of them."""

import resource
import time
from collections import defaultdict, deque
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch

from pipeline_task import Task
from pyparallel.pipeline import (
    Costs,
    Interlocking,
    PipelineShape,
    PipelineTrainer,
    Schedule,
    Span,
    Timeline,
    simulate,
    simulate_interlocking,
)

WATCHED = 20  # steps at the end over which waiting is measured
SHOWN = 12  # microbatches in the picture, about


@dataclass(frozen=True)
class Run:
    """What is trained how, and where that is written."""

    name: str
    schedule: Schedule
    shape: PipelineShape
    task: Task
    data_size: str
    out: Path


class History:
    """What this rank saw; losses, in the task's unit, only on the rank of the last stage.

    Those of heads, by stage and step, where the rank's stages have some.
    """

    def __init__(self, trainer: PipelineTrainer, task: Task, shape: PipelineShape) -> None:
        self.losses: list[float] = []
        self.head_losses: dict[int, list[float]] = defaultdict(list)
        self.recent: deque[list[Span]] = deque(maxlen=steps_to_fill(shape) + WATCHED + 1)
        self._num_microbatches = shape.num_microbatches
        self.memory = self.memory_before = peak_memory()
        self._trainer = trainer
        self._task = task
        self._times: list[float] = []

    def note(self, loss: float | None) -> None:
        """After each step."""
        self._times.append(time.perf_counter())
        self.recent.append(self._trainer.spans)
        self.memory = peak_memory()
        if loss is not None:
            self.losses.append(loss * self._task.per_nat)
        for stage in self._trainer.stages:
            if stage.head_loss is not None:
                self.head_losses[stage.index].append(stage.head_loss * self._task.per_nat)

    def show_progress(self) -> str:
        """The loss over the last steps."""
        last = self.losses[-10:]
        return f"{sum(last) / len(last):.2f} {self._task.loss_unit}"

    def recent_spans(self) -> list[Span]:
        """Of the last steps, the microbatches counted from the first of them."""
        first = (len(self._times) - len(self.recent)) * self._num_microbatches
        return [
            replace(span, action=span.action._replace(microbatch=span.action.microbatch - first))
            for span in chain.from_iterable(self.recent)
        ]

    @property
    def step_seconds(self) -> float:
        """Without the first step, in which memory is laid out."""
        return (self._times[-1] - self._times[0]) / (len(self._times) - 1)


def peak_memory() -> int:
    """Bytes: on a GPU, of tensors; else of the whole process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def steps_to_fill(shape: PipelineShape) -> int:
    """After so many calls the pipe is full, whatever the schedule."""
    return 1 + -(-shape.num_stages // shape.num_microbatches)


def simulate_steps(run: Run, costs: Costs, calls: int) -> Timeline:
    """So many steps, from an empty pipe on."""
    if isinstance(run.schedule, Interlocking):
        return simulate_interlocking(run.schedule, run.shape, costs, steps=calls)
    ranks = range(run.shape.num_ranks)
    actions = [run.schedule.rank_actions(run.shape, rank, calls) for rank in ranks]
    return simulate(actions, costs, run.schedule.versions(run.shape))


def waiting_of(timeline: Timeline, shape: PipelineShape) -> float:
    """The part of all ranks' time in which they wait, over whole steps in a full pipe."""
    begins = timeline.step_starts(shape.num_microbatches)
    return timeline.bubble_between(begins[steps_to_fill(shape)], begins[-1])


def draw(run: Run, timeline: Timeline, paper: Timeline) -> None:
    """The last steps as they ran, above the same steps as the simulator has them."""
    from pyparallel.pipeline.simulation.picture import draw_timeline  # noqa: PLC0415  only rank 0 pays for it

    steps = max(1, SHOWN // run.shape.num_microbatches)
    parts = []
    for whole in (timeline, paper):
        begins = whole.step_starts(run.shape.num_microbatches)
        parts.append(whole.between(begins[-1 - steps], begins[-1]))
    what = "last step" if steps == 1 else f"last {steps} steps"
    titles = f"{run.name}\n{what} as they ran", "the same, simulated with the median times"
    draw_timeline(dict(zip(titles, parts, strict=True)), run.out / "pipeline.png", unit="s")
