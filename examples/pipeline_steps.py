"""The history of steps in train_pipeline.py, and the timelines of them."""

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

WATCHED = 20  # steps at the end in which idle time is measured
SHOWN = 12  # microbatches in the picture, about


@dataclass(frozen=True)
class Run:
    """The settings of a run."""

    name: str
    schedule: Schedule
    shape: PipelineShape
    task: Task
    data_size: str
    out: Path


class History:
    """The history of this rank: losses in the task's unit, memory, and spans of the last steps.

    Only the rank of the last stage has ``losses``; those of heads are by stage.
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

    def record(self, loss: float | None) -> None:
        """Record a step; call it after each one."""
        self._times.append(time.perf_counter())
        self.recent.append(self._trainer.spans)
        self.memory = peak_memory()
        if loss is not None:
            self.losses.append(loss * self._task.per_nat)
        for stage in self._trainer.stages:
            if stage.head_loss is not None:
                self.head_losses[stage.index].append(stage.head_loss * self._task.per_nat)

    def show_progress(self) -> str:
        """Return the mean loss of the last steps."""
        last = self.losses[-10:]
        return f"{sum(last) / len(last):.2f} {self._task.loss_unit}"

    def recent_spans(self) -> list[Span]:
        """Return the spans of the last steps, with microbatches counted from the first of them."""
        first = (len(self._times) - len(self.recent)) * self._num_microbatches
        return [
            replace(span, action=span.action._replace(microbatch=span.action.microbatch - first))
            for span in chain.from_iterable(self.recent)
        ]

    @property
    def step_seconds(self) -> float:
        """Return the mean seconds per step, without the first one, which allocates memory."""
        return (self._times[-1] - self._times[0]) / (len(self._times) - 1)


def peak_memory() -> int:
    """Return the peak bytes of tensors on a GPU, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def steps_to_fill(shape: PipelineShape) -> int:
    """Return the number of steps after which any schedule is in steady state."""
    return 1 + -(-shape.num_stages // shape.num_microbatches)


def simulate_steps(run: Run, costs: Costs, steps: int) -> Timeline:
    """Simulate ``steps`` steps, from an empty pipeline to an empty pipeline."""
    if isinstance(run.schedule, Interlocking):
        return simulate_interlocking(run.schedule, run.shape, costs, steps=steps)
    ranks = range(run.shape.num_ranks)
    actions = [run.schedule.rank_actions(run.shape, rank, steps) for rank in ranks]
    return simulate(actions, costs, run.schedule.versions(run.shape))


def bubble_of(timeline: Timeline, shape: PipelineShape) -> float:
    """Return the idle fraction of all ranks' time, over whole steps in steady state."""
    begins = timeline.step_starts(shape.num_microbatches)
    return timeline.bubble_between(begins[steps_to_fill(shape)], begins[-1])


def draw(run: Run, timeline: Timeline, simulated: Timeline) -> None:
    """Draw the last steps as they ran, above the same steps simulated."""
    from pyparallel.pipeline.simulation.picture import draw_timeline

    steps = max(1, SHOWN // run.shape.num_microbatches)
    parts = []
    for whole in (timeline, simulated):
        begins = whole.step_starts(run.shape.num_microbatches)
        parts.append(whole.between(begins[-1 - steps], begins[-1]))
    what = "last step" if steps == 1 else f"last {steps} steps"
    titles = f"{run.name}\n{what} as they ran", "the same, simulated with the median times"
    draw_timeline(dict(zip(titles, parts, strict=True)), run.out / "pipeline.png", unit="s")
