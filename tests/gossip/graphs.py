"""Topologies used only by tests."""

from pyparallel.gossip.topology import Topology


class StarWithChords(Topology):
    """An irregular graph: rank 0 sends to all, the others to 0, odd ranks also to the next."""

    def out_peers(self, rank, round_index):
        if rank == 0:
            return tuple(range(1, self.num_ranks))
        chord = (rank + 1,) if rank % 2 and rank + 1 < self.num_ranks else ()
        return (0, *chord)


class Broken(Topology):
    """A topology of given out-peers, for which the base class derives the rest."""

    def __init__(self, *sends: tuple[int, ...], share: float | None = None) -> None:
        super().__init__(len(sends))
        self.sends = sends
        self._share = share

    def out_peers(self, rank, round_index):
        return self.sends[rank]

    def shares(self, rank, round_index):
        if self._share is None:
            return super().shares(rank, round_index)
        return (self._share,) * len(self.sends[rank])
