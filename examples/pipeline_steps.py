"""What train_pipeline.py remembers of its steps, and the timelines it makes of them."""

import math
import resource
import time
from collections import deque
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch

from pyparallel.pipeline import (
    Costs,
    Layout,
    PipelineTrainer,
    Schedule,
    Simulation,
    Span,
    Timeline,
    simulate,
)

WATCHED = 20  # steps at the end over which waiting is measured
SHOWN = 12  # microbatches in the picture, about


@dataclass(frozen=True)
class Run:
    """What is trained how, and where that is written."""

    name: str
    schedule: Schedule
    layout: Layout
    step_tokens: int
    text: str
    out: Path


class History:
    """What this rank saw; losses, in nats per byte, only on the rank of the last stage."""

    def __init__(self, trainer: PipelineTrainer, layout: Layout) -> None:
        self.losses: list[float] = []
        self.recent: deque[list[Span]] = deque(maxlen=calls_to_fill(layout) + WATCHED + 1)
        self._num_microbatches = layout.num_microbatches
        self.memory = self.memory_before = peak_memory()
        self._trainer = trainer
        self._times: list[float] = []

    def note(self, loss: float | None) -> None:
        """After each step."""
        self._times.append(time.perf_counter())
        self.recent.append(self._trainer.spans)
        self.memory = peak_memory()
        if loss is not None:
            self.losses.append(loss)

    def mean_bits(self, steps: int) -> float:
        """Bits per byte, over the last so many steps."""
        last = self.losses[-steps:]
        return sum(last) / len(last) / math.log(2)

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


def calls_to_fill(layout: Layout) -> int:
    """After so many calls the pipe is full, whatever the schedule."""
    return 1 + -(-layout.num_stages // layout.num_microbatches)


def simulate_steps(run: Run, costs: Costs, calls: int) -> Simulation:
    """So many steps, from an empty pipe on."""
    ranks = range(run.layout.num_ranks)
    actions = [run.schedule.rank_actions(run.layout, rank, calls) for rank in ranks]
    return simulate(actions, costs, run.schedule.versions(run.layout))


def waiting_of(timeline: Timeline, layout: Layout) -> float:
    """The part of all ranks' time in which they wait, over whole steps in a full pipe."""
    begins = timeline.call_starts(layout.num_microbatches)
    return timeline.bubble_between(begins[calls_to_fill(layout)], begins[-1])


def draw(run: Run, timeline: Timeline, paper: Timeline) -> None:
    """The last steps as they ran, above the same steps as the simulator has them."""
    from pyparallel.pipeline.picture import draw_timeline  # noqa: PLC0415  only rank 0 pays for it

    steps = max(1, SHOWN // run.layout.num_microbatches)
    parts = []
    for whole in (timeline, paper):
        begins = whole.call_starts(run.layout.num_microbatches)
        parts.append(whole.between(begins[-1 - steps], begins[-1]))
    what = "last step" if steps == 1 else f"last {steps} steps"
    titles = f"{run.name}\n{what} as they ran", "the same, simulated with the median times"
    draw_timeline(dict(zip(titles, parts, strict=True)), run.out / "pipeline.png", unit="s")
