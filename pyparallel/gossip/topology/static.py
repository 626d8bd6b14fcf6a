"""Static topologies that are not circulant."""

from typing_extensions import override

from ...training.arguments import require
from .base import Topology


class Torus(Topology):
    """A two-dimensional torus: four neighbors, on a grid as square as the number of ranks allows.

    With a prime number of ranks it is a ring. ``num_rows`` is a divisor of ``num_ranks``; None: the
    largest one up to its square root.
    """

    regular = True

    def __init__(self, num_ranks: int, num_rows: int | None = None) -> None:
        super().__init__(num_ranks)
        divisors = [rows for rows in range(1, num_ranks + 1) if num_ranks % rows == 0]
        if num_rows is None:
            num_rows = max(rows for rows in divisors if rows * rows <= num_ranks)
        rule = f"num_rows must be one of {divisors} for {num_ranks} ranks"
        require(num_rows in divisors, rule, num_rows)
        self.num_rows = num_rows
        self.num_columns = num_ranks // num_rows

    @override
    def out_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        """Return the left, right, upper and lower neighbor, without duplicates."""
        row, column = divmod(rank, self.num_columns)
        steps = [(0, -1), (0, 1), (-1, 0), (1, 0)]
        around = [
            (row + down) % self.num_rows * self.num_columns + (column + right) % self.num_columns
            for down, right in steps
        ]
        return tuple(peer for peer in dict.fromkeys(around) if peer != rank)

    @override
    def in_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        return tuple(sorted(self.out_peers(rank, round_index)))

    def __repr__(self) -> str:
        return f"Torus({self.num_ranks}, num_rows={self.num_rows})"


class Star(Topology):
    """A star: all ranks exchange with one center.

    Not regular: the leaves keep half of their mass and the center 1/n of its own, so push-sum
    weights differ from 1.
    """

    def __init__(self, num_ranks: int, center: int = 0) -> None:
        super().__init__(num_ranks)
        if center not in range(num_ranks):
            raise ValueError(f"center must be a rank from 0 to {num_ranks - 1}, got {center}")
        self.center = center

    @override
    def out_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        if rank == self.center:
            return tuple(peer for peer in range(self.num_ranks) if peer != rank)
        return (self.center,)

    @override
    def in_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        return self.out_peers(rank, round_index)

    def __repr__(self) -> str:
        return f"Star({self.num_ranks}, center={self.center})"
