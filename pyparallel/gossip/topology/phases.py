"""A schedule of topologies, each used for many rounds."""

from collections.abc import Sequence
from itertools import accumulate

from typing_extensions import override

from .base import Topology, check_topology


class Phases(Topology):
    """A schedule of topologies, such as a dense one for the first epochs.

    Assran et al. (ICML 2019) recover most of the accuracy that one peer a round costs on many ranks
    by averaging with all ranks, or with two peers, for the first third of training. Mass is sent
    with each message, so it is conserved when the number of peers changes.

    Args:
        phases: topologies for the same number of ranks, each with its number of rounds; the
            schedule repeats after the last one.
    """

    def __init__(self, phases: Sequence[tuple[Topology, int]]) -> None:
        self.phases = tuple(phases)
        for topology, _ in self.phases:
            check_topology(topology, "each topology of phases")
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
    @override
    def period(self) -> int:
        return self._ends[-1]

    @property
    @override
    def regular(self) -> bool:
        # A regular phase does not bring weights back to 1, so all phases must be regular.
        return all(topology.regular for topology, _ in self.phases)

    @property
    @override
    def degree(self) -> int:
        return max(topology.degree for topology, _ in self.phases)

    @override
    def out_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        topology, index = self._locate(round_index)
        return topology.out_peers(rank, index)

    @override
    def in_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        topology, index = self._locate(round_index)
        return topology.in_peers(rank, index)

    @override
    def shares(self, rank: int, round_index: int) -> tuple[float, ...]:
        topology, index = self._locate(round_index)
        return topology.shares(rank, index)

    @override
    def fingerprint(self) -> str:
        # Of each phase instead of each round: phases may last for very many rounds.
        return "; ".join(f"{each.fingerprint()} x {count}" for each, count in self.phases)

    @override
    def validate(self) -> None:
        """Check each phase by itself.

        Raises:
            ValueError: the first violation found.
        """
        for topology, _ in self.phases:
            topology.validate()

    def _locate(self, round_index: int) -> tuple[Topology, int]:
        index = round_index % self.period
        phase = next(phase for phase, end in enumerate(self._ends) if index < end)
        return self.phases[phase][0], index - (self._ends[phase - 1] if phase else 0)

    def __repr__(self) -> str:
        return f"Phases({list(self.phases)!r})"
