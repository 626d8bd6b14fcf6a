"""The schedule of interlocking backpropagation."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from typing_extensions import override

from ...training.arguments import check_integer, find_error, has_methods, require
from ..runtime.loss import Loss
from ..schedules.action import Action, Kind
from ..schedules.one_forward_one_backward import in_order
from ..schedules.schedule import Schedule
from ..schedules.shape import PipelineShape
from ..schedules.versions import Live, Versions
from .heads import Heads, as_heads
from .window import Farthest, Losses, Window


@dataclass(frozen=True)
class Interlocking(Schedule):
    """Training in which every stage learns from the losses of the next stages in a window.

    Interlocking backpropagation (Gomez et al., JMLR 23(171), 2022, arXiv 2010.04116). Each stage
    but the last has a head, which maps the stage's output to an output of the model. Stage s of D
    learns from the loss of stage min(s + window - 1, D - 1): with window 1 from its own (local
    learning), with window D from the true loss (backpropagation). A head learns from its own loss
    alone. Its gradient is sent to the previous stages as soon as it is computed, apart from all
    others: so a slow stage delays only the stages that learn from its loss or later ones.

    A stage updates once at the end of its own step; no stage waits for another's step to end. Every
    rank must be given the target, and holds one stage, or a single process all.

    A loss that is not finite, or has an invalid target on its rank, has no gradient: the stage of
    its head, and those that learn from it, skip the update of the step, and their ranks raise at
    the end of it. The host reads each loss before its backward.

    Args:
        window: how many losses a stage can learn from, its own included.
        heads: one for each stage but the last, a builder or a module; or one builder for all. The
            module maps its stage's output to the ``output`` of the loss.
        losses: what a stage learns from: ``Farthest()`` as in the paper, or ``Sum()`` or ``Mean()``
            of the window.
        head_loss_fn: of a head's output and the target; None: the loss of the trainer.
        max_ahead: how many steps a stage may be ahead of the next one with window 1, where no
            gradient makes it wait.
    """

    needs_batch = True  # heads are built for the outputs of their stages

    window: int
    heads: Heads = ()
    losses: Losses = field(default_factory=Farthest)
    head_loss_fn: Loss | None = field(default=None, repr=False)  # ranks compare the repr
    max_ahead: int = 1

    def __post_init__(self) -> None:
        for name in ("window", "max_ahead"):
            check_integer(name, getattr(self, name))
        rule = "losses must have a method weight(origin, stage, farthest), as Farthest(), Sum() and"
        require(has_methods(self.losses, "weight"), f"{rule} Mean() do", repr(self.losses))

    @override
    def error_at(self, shape: PipelineShape) -> str | None:
        if self.window > shape.num_stages:
            return (
                f"window must be from 1 to the number of stages, {shape.num_stages}, got "
                f"{self.window}"
            )
        if shape.num_ranks not in (1, shape.num_stages):
            return (
                "Interlocking must have one stage on each rank, or all of them in one process, got "
                f"{shape.num_stages} stages on {shape.num_ranks} ranks"
            )
        problem = find_error(lambda: as_heads(self.heads, shape.num_stages))
        return None if problem is None else str(problem)

    def reach(self, shape: PipelineShape) -> Window:
        """Return the window: which losses each stage learns from."""
        return Window(shape.num_stages, self.window, self.losses)

    @override
    def step(self, shape: PipelineShape, rank: int, index: int) -> Iterator[Action]:
        first = index * shape.num_microbatches
        microbatches = range(first, first + shape.num_microbatches)
        window = self.reach(shape)
        stages = [_slots(window, stage, microbatches) for stage in shape.stages(rank)]
        for stage, kind, microbatch in in_order(stages):
            yield Action(stage, kind, microbatch)
            if kind is Kind.FORWARD and stage < shape.num_stages - 1:
                yield Action(stage, Kind.HEAD, microbatch)
        for stage in shape.stages(rank):
            yield Action(stage, Kind.UPDATE, microbatches[-1])

    @override
    def update_index(self, shape: PipelineShape, microbatch: int) -> int:
        return microbatch // shape.num_microbatches

    @override
    def versions(self, shape: PipelineShape) -> Versions:
        return Live()  # no update comes between a microbatch's forward and its backward


def _slots(window: Window, stage: int, microbatches: range) -> Iterator[tuple[int, int, Kind, int]]:
    """Yield a stage's forwards, and its backwards as soon as the farthest gradient can arrive.

    In ticks of ``one_forward_one_backward.slots``; a gradient takes one for each stage it passes.
    """
    farthest = window.farthest(stage)
    ahead = farthest - stage
    for place in range(len(microbatches) + ahead):
        tick = stage + 2 * place
        if place < len(microbatches):
            yield tick, stage, Kind.FORWARD, microbatches[place]
        if place >= ahead:
            yield tick + 1, stage, Kind.LEARN, microbatches[place - ahead]
