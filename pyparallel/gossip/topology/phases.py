"""A schedule of topologies, each used for many rounds."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from typing_extensions import override

from ...training import wrong_type
from ...training.arguments import is_integer, require
from .base import OfOthers, Topology, check_topology


class Phases(OfOthers):
    """A schedule of topologies, such as a dense one for the first epochs.

    Assran et al. (ICML 2019) recover most of the accuracy that one peer a round costs on many ranks
    by averaging with all ranks, or with two peers, for the first third of training. Mass is sent
    with each message, so it is conserved when the number of peers changes. A sparse topology and a
    round of ``Complete``, over and over, are Gossip-PGA (Chen et al., ICML 2021, arXiv 2105.09080).

    Args:
        phases: topologies for the same number of ranks, each with its number of rounds. None, for
            the last one only, lets it go on for good; otherwise the schedule repeats.
    """

    def __init__(self, phases: Sequence[tuple[Topology, int | None]]) -> None:
        self.phases = tuple(phases)
        require(self.phases, "phases must hold at least one pair (topology, rounds)", "none")
        for phase in self.phases:
            if not isinstance(phase, Sequence) or len(phase) != 2:
                raise wrong_type("each of phases", "a pair (topology, rounds)", phase)
            check_topology(phase[0], "each topology of phases")
        sizes = sorted({topology.num_ranks for topology, _ in self.phases})
        require(len(sizes) == 1, "phases must be for one number of ranks", str(sizes))
        super().__init__(sizes[0])
        for place, (topology, num_rounds) in enumerate(self.phases, 1):
            _check_phase(topology, num_rounds, is_last=place == len(self.phases))
        self._ends = list(accumulate(count for _, count in self.phases if count is not None))
        last, num_rounds = self.phases[-1]
        rounds_before_last = self._ends[-1] if self._ends else 0
        self.period = last.period if num_rounds is None else rounds_before_last
        self.preperiod = rounds_before_last + last.preperiod if num_rounds is None else 0
        # A regular phase does not bring weights back to 1, so all phases must be regular.
        self.regular = all(topology.regular for topology, _ in self.phases)

    @property
    @override
    def degree(self) -> int:
        return max(topology.degree for topology, _ in self.phases)

    @override
    def fingerprint(self) -> str:
        # Of each phase instead of each round: phases may last for very many rounds.
        return "; ".join(f"{each.fingerprint()} x {count}" for each, count in self.phases)

    @override
    def validate(self) -> None:
        """Check each phase by itself."""
        for topology, _ in self.phases:
            topology.validate()

    @override
    def _locate(self, round_index: int) -> tuple[Topology, int]:
        index = round_index
        if self.phases[-1][1] is not None:
            index %= self.period
        phase = bisect_right(self._ends, index)
        return self.phases[phase][0], index - (self._ends[phase - 1] if phase else 0)

    def __repr__(self) -> str:
        return f"Phases({list(self.phases)!r})"


def _check_phase(topology: Topology, num_rounds: object, *, is_last: bool) -> None:
    if num_rounds is None:
        rule = "phases must each have a number of rounds, except for the last"
        require(is_last, rule, f"None for {topology!r} before it")
        return
    needed = len(topology.rounds)
    rule = "phases must each last a number of rounds of at least its topology's period, "
    require(is_integer(num_rounds, needed), f"{rule}{needed} for {topology!r}", repr(num_rounds))
