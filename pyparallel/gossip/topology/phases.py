"""One topology after another, each for many rounds."""

from collections.abc import Sequence
from itertools import accumulate

from .base import Topology


class Phases(Topology):
    """Topologies that follow each other, such as a dense one for the first epochs.

    Assran et al. (ICML 2019) recover most of the accuracy that one peer a round costs on many ranks
    by averaging with everyone, or with two peers, for the first third of training. A message always
    carries its mass, so changing the number of peers loses none and makes none.

    Args:
        phases: topologies for the same number of ranks, each with its number of rounds. After the
            last round of the last one the first begins again.
    """

    def __init__(self, phases: Sequence[tuple[Topology, int]]) -> None:
        self.phases = tuple(phases)
        sizes = sorted({topology.num_ranks for topology, _ in self.phases})
        if len(sizes) != 1:
            raise ValueError(f"phases must be for one number of ranks, got {sizes}")
        super().__init__(sizes[0])
        for topology, num_rounds in self.phases:
            if not isinstance(num_rounds, int) or num_rounds < topology.period:
                raise ValueError(
                    "phases must each last a number of rounds of at least its topology's period, "
                    f"{topology.period} for {topology!r}, got {num_rounds!r}"
                )
        self._ends = list(accumulate(num_rounds for _, num_rounds in self.phases))

    @property
    def period(self) -> int:
        """The rounds of all phases together."""
        return self._ends[-1]

    @property
    def regular(self) -> bool:
        """Whether all of them are: weights that have left 1 do not come back."""
        return all(topology.regular for topology, _ in self.phases)

    @property
    def degree(self) -> int:
        """The most of any."""
        return max(topology.degree for topology, _ in self.phases)

    def out_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        """As the phase says that the round lies in."""
        topology, index = self._locate(round_index)
        return topology.out_peers(rank, index)

    def in_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        """Likewise."""
        topology, index = self._locate(round_index)
        return topology.in_peers(rank, index)

    def shares(self, rank: int, round_index: int) -> tuple[float, ...]:
        """Likewise."""
        topology, index = self._locate(round_index)
        return topology.shares(rank, index)

    def fingerprint(self) -> str:
        """Those of the phases, which may last for very many rounds."""
        return "; ".join(f"{each.fingerprint()} x {count}" for each, count in self.phases)

    def validate(self) -> None:
        """Each phase by itself.

        Raises:
            ValueError: the first violation found.
        """
        for topology, _ in self.phases:
            topology.validate()

    def _locate(self, round_index: int) -> tuple[Topology, int]:
        index = round_index % self.period
        place = next(place for place, end in enumerate(self._ends) if index < end)
        return self.phases[place][0], index - (self._ends[place - 1] if place else 0)

    def __repr__(self) -> str:
        return f"Phases({list(self.phases)!r})"
