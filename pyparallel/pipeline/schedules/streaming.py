"""The order of all asynchronous schedules: 1F1B that never flushes."""

from collections.abc import Iterable, Iterator

from .action import Action, Kind
from .one_forward_one_backward import in_order, pending_backwards, slots
from .schedule import Schedule
from .shape import PipelineShape


class Streaming(Schedule):
    """1F1B without a flush: calls follow each other, and the pipe stays full between them.

    A call ends on each stage just before the first forward of the next. A subclass adds which
    weights are read.
    """

    def microbatches_per_update(self, layout: PipelineShape) -> int:
        """After how many backwards a stage updates its weights."""
        return 1

    def update_index(self, layout: PipelineShape, microbatch: int) -> int:
        """Updates are counted alike on all stages."""
        return microbatch // self.microbatches_per_update(layout)

    def call(self, layout: PipelineShape, rank: int, index: int) -> Iterator[Action]:
        """Forwards of this call, and the backwards that fall between them."""
        begin = index * layout.num_microbatches
        fed = range(begin, begin + layout.num_microbatches)
        stages = [slots(layout, stage, fed) for stage in layout.stages(rank)]
        return self._with_updates(layout, in_order(stages))

    def drain(self, layout: PipelineShape, rank: int, calls: int) -> Iterator[Action]:
        """The backwards that are left."""
        total = calls * layout.num_microbatches
        stages = [pending_backwards(layout, stage, total) for stage in layout.stages(rank)]
        return self._with_updates(layout, in_order(stages))

    def _with_updates(
        self, layout: PipelineShape, order: Iterable[tuple[int, Kind, int]]
    ) -> Iterator[Action]:
        every = self.microbatches_per_update(layout)
        for stage, kind, microbatch in order:
            yield Action(stage, kind, microbatch)
            if kind is Kind.BACKWARD and (microbatch + 1) % every == 0:
                yield Action(stage, Kind.UPDATE, microbatch)


class UpdatingOncePerCall(Streaming):
    """A stream whose stages update when the last microbatch of a call has come back."""

    def microbatches_per_update(self, layout: PipelineShape) -> int:
        """All microbatches of a call."""
        return layout.num_microbatches
