"""Pipelines with replicas: the actions of a schedule, each on all replicas at once."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...pipeline.schedules import Kind, PipelineShape, Schedule
from ...training.arguments import check_in, check_type, raise_problem, require
from .algorithms import Gradients, Steps

_TOWARDS = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_INPUT: -1}


@dataclass(frozen=True)
class Pipeline:
    """A pipeline, of which there are as many replicas as the ranks are for.

    Stages have equal parts of computing, of the optimizer's step and of the model's bytes, and are
    on consecutive ranks, one each, replica after replica: the mesh of ``PipelineTrainer``.

    Args:
        schedule: of ``pyparallel.pipeline``, but ``Interlocking``.
        num_microbatches: of a step.
        activation_bytes: of a message between two stages: a microbatch's activations or gradients.
    """

    schedule: Schedule
    num_stages: int
    num_microbatches: int
    activation_bytes: float = 0.0

    def __post_init__(self) -> None:
        check_type("schedule", self.schedule, Schedule, "a schedule such as PipeOptim()")
        has_one_loss = self.schedule.flushes or self.schedule.delays
        require(has_one_loss, "schedule must be one with a single loss", repr(self.schedule))
        check_in("activation_bytes", self.activation_bytes, "[0, inf)")
        raise_problem(self.schedule.error_at(self.shape))

    @property
    def shape(self) -> PipelineShape:
        """Return its numbers of stages, microbatches and ranks."""
        return PipelineShape(self.num_stages, self.num_microbatches, self.num_stages)


class Pipelines:
    """All replicas of a pipeline.

    They have the same actions, and wait for each other at the same ones. So an action of all
    replicas is a few operations on arrays, in any order in which the stages can run.

    Args:
        stages: the algorithm's steps of each, on a clock of the ranks that have it.
        forward_share: of computing that is forward.
    """

    def __init__(self, pipeline: Pipeline, stages: Sequence[Steps], forward_share: float) -> None:
        self._pipeline, self._stages = pipeline, stages
        backward = 1 - forward_share
        seconds = forward_share, backward, backward / 2, backward / 2  # by kind
        parts = pipeline.num_stages * pipeline.num_microbatches
        self._shares = [each / parts for each in seconds]
        self._received: dict[tuple[int, int, int], np.ndarray] = {}  # sender, receiver, microbatch
        self._ready: dict[int, list[np.ndarray]] = defaultdict(list)  # to average, by step
        self._num_done = 0  # actions

    def run(self, num_steps: int) -> Iterator[tuple[int, int]]:
        """Run; yield a stage and how many steps it has taken, whenever it has taken one more.

        The last is yielded again, when all stages of a replica have ended and have received what
        was in flight. A schedule that deadlocks is a ValueError.
        """
        programs = {each: self._run_stage(each, num_steps) for each in range(len(self._stages))}
        while programs:
            before = self._num_done
            for stage, program in list(programs.items()):
                for step in program:
                    if step is None:
                        break
                    yield stage, step
                else:
                    del programs[stage]
            require(
                self._num_done > before, "schedule must not deadlock", repr(self._pipeline.schedule)
            )
        ends = np.max([each.clock.now for each in self._stages], axis=0)
        for stage, steps in enumerate(self._stages):
            steps.clock.wait(ends)
            steps.flush()
            yield stage, num_steps

    def _run_stage(self, stage: int, num_steps: int) -> Iterator[int | None]:
        """Run a stage; yield how many steps it has taken, and None while it waits for another."""
        shape, clock = self._pipeline.shape, self._stages[stage].clock
        count = shape.num_microbatches
        for _, kind, microbatch in self._pipeline.schedule.rank_actions(shape, stage, num_steps):
            towards = _TOWARDS.get(kind, 0)
            if towards and 0 <= stage - towards < shape.num_stages:
                message = stage - towards, stage, microbatch
                while message not in self._received:
                    yield None
                clock.wait(self._received.pop(message))
            self._num_done += 1
            if kind is Kind.UPDATE:
                yield from self._update(stage, microbatch // count)
                if (microbatch + 1) % count == 0:
                    yield (microbatch + 1) // count
                continue
            clock.compute(microbatch // count, self._shares[kind])
            if towards and 0 <= stage + towards < shape.num_stages:
                received = clock.send_to_stage(stage + towards, self._pipeline.activation_bytes)
                self._received[stage, stage + towards, microbatch] = received

    def _update(self, stage: int, step: int) -> Iterator[None]:
        """Update a stage; yield while other stages of a replica are not ready for averages."""
        steps = self._stages[stage]
        if type(steps) is Gradients and steps.clock.num_ranks > 1:
            ready = self._ready[step]
            ready.append(steps.clock.now)
            while len(ready) < len(self._stages):
                yield None
            steps.clock.wait(np.max(ready, axis=0))
            self._ready.pop(step - 1, None)
        if steps.clock.training is not None:
            steps.clock.training.compute(step)
        steps.before_update()
        steps.clock.update()
        steps.after_update()
