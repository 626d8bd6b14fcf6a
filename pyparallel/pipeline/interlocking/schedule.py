"""Interlocking backpropagation: gradients that travel a limited way."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..runtime.loss import Loss
from ..schedules.action import Action, Kind
from ..schedules.one_forward_one_backward import in_order
from ..schedules.schedule import Schedule
from ..schedules.shape import PipelineShape
from ..schedules.versions import Live, Versions
from .heads import Heads, check_heads
from .window import Farthest, Losses, Window


@dataclass(frozen=True)
class Interlocking(Schedule):
    """Every stage learns from the losses of the next stages in a window, and waits for no others.

    Interlocking backpropagation (Gomez et al., JMLR 23(171), 2022, arXiv 2010.04116). All stages
    but the last have a head of their own, that makes an output which the loss takes of what the
    stage hands on. Stage s of D learns from the loss of stage min(s + window - 1, D - 1): with
    window 1 from its own (local learning), with window D from the true one (backpropagation). A
    head learns from its own loss alone, and its gradient goes down as soon as it is there, apart
    from all others: so a stage that is late delays only those that learn from it or what follows.

    A stage updates once in each call, at its end; no stage waits for the call of others to end. The
    loss is that of ``PipelineTrainer``, and every rank must be given the target. Stages come one to
    a rank, or all in one process.

    Args:
        window: how many losses are in reach of a stage, its own among them.
        heads: one for each stage but the last, a builder or a module; or one builder for all. The
            module maps what its stage hands on to an output that the loss takes.
        losses: what a stage learns from: ``Farthest()`` as in the paper, or ``Sum()`` or ``Mean()``
            of the window.
        head_loss_fn: of a head's output and the target; None: the loss of the trainer.
        max_ahead: with window 1 no gradient holds a stage back: how many calls it may be ahead of
            the next one.
    """

    window: int
    heads: Heads = ()
    losses: Losses = field(default_factory=Farthest)
    head_loss_fn: Loss | None = field(default=None, repr=False)  # a repr that ranks can compare
    max_ahead: int = 1

    def __post_init__(self) -> None:
        for name in ("window", "max_ahead"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if isinstance(self.losses, type) or not callable(getattr(self.losses, "weight", None)):
            raise ValueError(
                "losses must have a method weight(origin, stage, farthest), as Farthest(), Sum() "
                f"and Mean() do, got {self.losses!r}"
            )

    def validation_error(self, layout: PipelineShape) -> str | None:
        """A window beyond the last stage, a head that is missing, stages that share some ranks."""
        if self.window > layout.num_stages:
            return (
                f"window must be from 1 to the number of stages, {layout.num_stages}, got "
                f"{self.window}"
            )
        if layout.num_ranks not in (1, layout.num_stages):
            return (
                "Interlocking must have one stage on each rank, or all of them in one process, got "
                f"{layout.num_stages} stages on {layout.num_ranks} ranks"
            )
        return check_heads(self.heads, layout.num_stages)

    def reach(self, layout: PipelineShape) -> Window:
        """Who learns from whom."""
        return Window(layout.num_stages, self.window, self.losses)

    def step(self, layout: PipelineShape, rank: int, index: int) -> Iterator[Action]:
        """1F1B, as if the end of the window were the end of the pipe; then the updates."""
        first = index * layout.num_microbatches
        fed = range(first, first + layout.num_microbatches)
        window = self.reach(layout)
        stages = [_slots(window, stage, fed) for stage in layout.stages(rank)]
        for stage, kind, microbatch in in_order(stages):
            yield Action(stage, kind, microbatch)
            if kind is Kind.FORWARD and stage < layout.num_stages - 1:
                yield Action(stage, Kind.HEAD, microbatch)
        for stage in layout.stages(rank):
            yield Action(stage, Kind.UPDATE, fed[-1])

    def update_index(self, layout: PipelineShape, microbatch: int) -> int:
        """One update a call."""
        return microbatch // layout.num_microbatches

    def versions(self, layout: PipelineShape) -> Versions:
        """No update falls between a stage's forward and what it learns from it."""
        return Live()


def _slots(window: Window, stage: int, fed: range) -> Iterator[tuple[int, int, Kind, int]]:
    """A stage's forwards, and its learning as soon as the farthest loss can have come back.

    On the clock of ``one_forward_one_backward.slots``: the loss of stage j is there at tick j, its
    gradient a tick later for each stage that it travels.
    """
    farthest = window.farthest(stage)
    ahead = farthest - stage
    for place in range(len(fed) + ahead):
        tick = stage + 2 * place
        if place < len(fed):
            yield tick, stage, Kind.FORWARD, fed[place]
        if place >= ahead:
            yield tick + 1, stage, Kind.LEARN, fed[place - ahead]
