"""Which rank stores which rows (of dimension 0) of the full model while its subnets are trained."""

from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override


class Placement(Protocol):
    """Policy that gives each rank its rows: immutable, with a complete ``repr``."""

    def rows(self, num_rows: int, owner: int, num_ranks: int) -> range:
        """Return the rows of ``num_rows`` that rank ``owner`` stores; they ascend with the rank."""

    def validation_error(self, num_ranks: int) -> str | None:
        """Return why this number of ranks is not supported, or None."""
        return None


@dataclass(frozen=True)
class Sharded(Placement):
    """Placement with equal shares of every tensor's rows: from row ``o * rows // n`` on rank o.

    No rank stores the full model, and all take equal part in scatter and merge.
    """

    @override
    def rows(self, num_rows: int, owner: int, num_ranks: int) -> range:
        return range(owner * num_rows // num_ranks, (owner + 1) * num_rows // num_ranks)


@dataclass(frozen=True)
class Central(Placement):
    """Placement with the full model on one rank of the group, in addition to its own subnet."""

    rank: int = 0

    @override
    def rows(self, num_rows: int, owner: int, num_ranks: int) -> range:
        if owner == self.rank:
            return range(num_rows)
        # An empty range below or above the owner's rows, so that rows ascend with the rank.
        return range(0) if owner < self.rank else range(num_rows, num_rows)

    @override
    def validation_error(self, num_ranks: int) -> str | None:
        if not 0 <= self.rank < num_ranks:
            return f"Central's rank must be one of {num_ranks}, got {self.rank}"
        return None
