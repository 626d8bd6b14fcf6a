"""The order of the asynchronous schedules: 1F1B without a flush."""

from collections.abc import Iterable, Iterator

from typing_extensions import override

from .action import Action, Kind
from .one_forward_one_backward import in_order, pending_backwards, slots
from .schedule import Schedule
from .shape import PipelineShape


class Streaming(Schedule):
    """1F1B without a flush: the pipeline stays full between steps.

    A step ends on each stage just before the first forward of the next one. Subclasses define which
    weights are read.
    """

    delays = True
    updates_once_per_step = False  # else after each backward

    @override
    def microbatches_per_update(self, shape: PipelineShape) -> int:
        return shape.num_microbatches if self.updates_once_per_step else 1

    def update_index(self, shape: PipelineShape, microbatch: int) -> int:
        """Return the update of the microbatch, the same on all stages."""
        return microbatch // self.microbatches_per_update(shape)

    def delay(self, shape: PipelineShape, stage: int) -> int:
        """Return the updates between the first forward for an update and that update."""
        return -(-(shape.num_stages - 1 - stage) // self.microbatches_per_update(shape))

    def step(self, shape: PipelineShape, rank: int, index: int) -> Iterator[Action]:
        """Yield the forwards of this step, and the backwards that fall between them."""
        begin = index * shape.num_microbatches
        microbatches = range(begin, begin + shape.num_microbatches)
        stages = [slots(shape, stage, microbatches) for stage in shape.stages(rank)]
        return self._with_updates(shape, in_order(stages))

    def drain(self, shape: PipelineShape, rank: int, steps: int) -> Iterator[Action]:
        """Yield the pending backwards."""
        total = steps * shape.num_microbatches
        stages = [pending_backwards(shape, stage, total) for stage in shape.stages(rank)]
        return self._with_updates(shape, in_order(stages))

    def _with_updates(
        self, shape: PipelineShape, order: Iterable[tuple[int, Kind, int]]
    ) -> Iterator[Action]:
        every = self.microbatches_per_update(shape)
        for stage, kind, microbatch in order:
            yield Action(stage, kind, microbatch)
            if kind is Kind.BACKWARD and (microbatch + 1) % every == 0:
                yield Action(stage, Kind.UPDATE, microbatch)
