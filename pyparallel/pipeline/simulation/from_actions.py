"""A schedule that somebody has written down."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..schedules.action import Action, Kind
from ..schedules.schedule import Flushing
from ..schedules.shape import PipelineShape
from ..schedules.versions import Live, Versions
from .action_table import tabulate
from .csv_file import without_updates
from .simulate import simulate


@dataclass(frozen=True)
class FromActions(Flushing):
    """The actions of one call, such as ``read_csv`` reads; every stage updates at the end of it.

    Args:
        written: the actions of every rank; its updates, if there are any, after all else.

    Raises:
        ValueError: the ranks would wait for each other for ever (with the grid, in which the place
            is marked), something is missing or twice, or an update comes before the end.
    """

    written: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        for rank, actions in enumerate(self.written):
            kinds = [action.kind is Kind.UPDATE for action in actions]
            if kinds != sorted(kinds):
                early = actions[kinds.index(True)]
                raise ValueError(
                    f"actions must have a rank's updates at its end, got {early} of rank {rank} "
                    "before it; a schedule that does not flush is a class of its own"
                )
        simulate(self.written)

    def __repr__(self) -> str:
        ranks = "; ".join(" ".join(map(str, actions)) for actions in self.written)
        return f"FromActions({ranks})"

    def validation_error(self, shape: PipelineShape) -> str | None:
        """It is written for one shape."""
        table = tabulate(self.written)
        mine = PipelineShape(table.num_stages, table.num_microbatches, table.num_ranks)
        if mine != shape:
            return f"schedule must be for the trainer's {shape}, got actions for {mine}"
        if any(stage % shape.num_ranks != rank for stage, rank in enumerate(table.rank_of_stage)):
            return (
                "schedule must have stage s on rank s mod ranks, got stages on ranks "
                f"{table.rank_of_stage.tolist()}"
            )
        return None

    def order(self, shape: PipelineShape, rank: int) -> Iterator[tuple[int, Kind, int]]:
        """As it is written."""
        (actions,) = without_updates([self.written[rank]])
        return iter(actions)

    def versions(self, shape: PipelineShape) -> Versions:
        """No update falls between a forward and its backward."""
        return Live()
