"""A schedule from explicit actions."""

from collections.abc import Iterator
from dataclasses import dataclass

from ...pipeline.schedules.action import Action, Kind
from ...pipeline.schedules.schedule import Flushing
from ...pipeline.schedules.shape import PipelineShape
from .action_table import tabulate
from .csv_file import without_updates
from .simulate import simulate


@dataclass(frozen=True)
class FromActions(Flushing):
    """A flushing schedule from the actions of one step, such as ``read_csv`` returns.

    Each stage updates once, at the end; ``written`` may have the updates there. Ranks that would
    deadlock (the message shows where), and an action that is missing or repeated, are a ValueError.
    """

    written: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        for rank, actions in enumerate(self.written):
            kinds = [action.kind is Kind.UPDATE for action in actions]
            if kinds != sorted(kinds):
                early = actions[kinds.index(True)]
                raise ValueError(
                    f"actions must have a rank's updates at its end, got {early} of rank {rank} "
                    "before it; subclass Schedule for one that does not flush"
                )
        simulate(self.written)

    def __repr__(self) -> str:
        ranks = "; ".join(" ".join(map(str, actions)) for actions in self.written)
        return f"FromActions({ranks})"

    def error_at(self, shape: PipelineShape) -> str | None:
        """Return an error for any shape but that of the actions."""
        table = tabulate(self.written)
        own_shape = PipelineShape(table.num_stages, table.num_microbatches, table.num_ranks)
        if own_shape != shape:
            return f"schedule must be for the trainer's {shape}, got actions for {own_shape}"
        if any(stage % shape.num_ranks != rank for stage, rank in enumerate(table.rank_of_stage)):
            return (
                "schedule must have stage s on rank s mod ranks, got stages on ranks "
                f"{table.rank_of_stage.tolist()}"
            )
        return None

    def order(self, shape: PipelineShape, rank: int) -> Iterator[tuple[int, Kind, int]]:
        """Yield the actions of a rank without updates."""
        (actions,) = without_updates([self.written[rank]])
        return iter(actions)
