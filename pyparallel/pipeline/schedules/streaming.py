"""The order of the asynchronous schedules: 1F1B without a flush."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Self

from typing_extensions import override

from ...training.arguments import check_integer
from .action import Action, Kind
from .one_forward_one_backward import in_order, one_flush, slots
from .schedule import Schedule
from .shape import PipelineShape
from .versions import SynchronousStart, Versions


@dataclass(frozen=True, repr=False)
class Streaming(Schedule):
    """1F1B without a flush: the pipeline stays full between steps.

    A step ends on each stage just before the first forward of the next one. Subclasses define which
    weights are read.

    Args:
        synchronous_updates: so many updates of a run come first, each of which flushes the
            pipeline: their gradients are not delayed, and no weights are predicted. Transformers
            under AdamW need them; see "Choose a schedule" in the how-to guides. "warm-up": as many
            as the learning rate of a trainer's ``scheduler_fn`` rises in.
    """

    delays = True
    updates_once_per_step = False  # else after each backward

    synchronous_updates: int | Literal["warm-up"] = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if self.synchronous_updates != "warm-up":
            check_integer("synchronous_updates", self.synchronous_updates, 0)

    def __repr__(self) -> str:
        """Return the options, the start only if there is one; of subclasses without a repr."""
        names = [each.name for each in fields(self) if each.name != "synchronous_updates"]
        names += ["synchronous_updates"] * bool(self.synchronous_updates)
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__name__}({options})"

    @abstractmethod
    def streaming_versions(self, shape: PipelineShape) -> Versions:
        """Return the policy of which weights each action reads after the synchronous updates."""

    @override
    def versions(self, shape: PipelineShape) -> Versions:
        versions, start = self.streaming_versions(shape), self._start
        return SynchronousStart(versions, start) if start else versions

    @override
    def after(self, updates: int) -> Self:
        left = max(0, self._start - updates)
        return self if left == self._start else replace(self, synchronous_updates=left)

    @override
    def with_warm_up(self, find_updates: Callable[[], int]) -> Self:
        if self.synchronous_updates != "warm-up":
            return self
        return replace(self, synchronous_updates=find_updates())

    @property
    def _start(self) -> int:
        start, rule = self.synchronous_updates, "synchronous_updates must be a number"
        if start == "warm-up":
            raise ValueError(f"{rule} without a trainer, got {start!r}")
        return start

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
        begin, every = index * shape.num_microbatches, self.microbatches_per_update(shape)
        end, start = begin + shape.num_microbatches, self._start * every
        for first in range(begin, min(start, end), every):
            yield from self._with_updates(shape, one_flush(shape, rank, every), first)
        microbatches = range(max(begin, start) - start, end - start)
        stages = [slots(shape, stage, microbatches) for stage in shape.stages(rank)]
        yield from self._with_updates(shape, in_order(stages), start)

    def drain(self, shape: PipelineShape, rank: int, steps: int) -> Iterator[Action]:
        """Yield the pending backwards."""
        start = self._start * self.microbatches_per_update(shape)
        total = max(0, steps * shape.num_microbatches - start)
        none_left = range(total, total)
        stages = [slots(shape, stage, none_left, drains=True) for stage in shape.stages(rank)]
        return self._with_updates(shape, in_order(stages), start)

    def _with_updates(
        self, shape: PipelineShape, order: Iterable[tuple[int, Kind, int]], first: int
    ) -> Iterator[Action]:
        """Yield an order whose microbatches are counted from ``first``, with its updates."""
        every = self.microbatches_per_update(shape)
        for stage, kind, count in order:
            microbatch = first + count
            yield Action(stage, kind, microbatch)
            if kind is Kind.BACKWARD and (microbatch + 1) % every == 0:
                yield Action(stage, Kind.UPDATE, microbatch)
