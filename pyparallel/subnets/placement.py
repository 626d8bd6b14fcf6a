"""Where the whole model rests while its subnets are trained: by rows of dimension 0."""

from dataclasses import dataclass
from typing import Protocol


class Placement(Protocol):
    """Who owns which rows: an immutable object whose ``repr`` says all of it."""

    def rows(self, num_rows: int, owner: int, num_ranks: int) -> range:
        """The rows of a tensor with so many that a rank owns; ranks own ascending ones."""

    def validation_error(self, num_ranks: int) -> str | None:
        """What forbids so many ranks, or None."""


@dataclass(frozen=True)
class Sharded:
    """Every rank owns as many rows of every parameter: rows ``o * rows // n`` on for rank o.

    No rank holds the whole model, and each takes part in handing out and merging alike.
    """

    def rows(self, num_rows: int, owner: int, num_ranks: int) -> range:
        """As `Placement.rows`."""
        return range(owner * num_rows // num_ranks, (owner + 1) * num_rows // num_ranks)

    def validation_error(self, num_ranks: int) -> str | None:
        """None: any number."""
        return None


@dataclass(frozen=True)
class Central:
    """One rank owns the whole model, beside its own subnet.

    Args:
        rank: of the process group.
    """

    rank: int = 0

    def rows(self, num_rows: int, owner: int, num_ranks: int) -> range:
        """As `Placement.rows`."""
        if owner == self.rank:
            return range(num_rows)
        # An empty range where it would stand among the others, so that rows ascend.
        return range(0) if owner < self.rank else range(num_rows, num_rows)

    def validation_error(self, num_ranks: int) -> str | None:
        """It must be one of the ranks."""
        if not 0 <= self.rank < num_ranks:
            return f"Central's rank must be one of {num_ranks}, got {self.rank}"
        return None
