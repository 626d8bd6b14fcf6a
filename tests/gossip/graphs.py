"""Topologies used only by tests."""

from pyparallel.gossip.topology import Topology


class StarWithChords(Topology):
    """An irregular graph: rank 0 sends to all, the others to 0, odd ranks also to the next."""

    def out_peers(self, rank, round_index):
        if rank == 0:
            return tuple(range(1, self.num_ranks))
        chord = (rank + 1,) if rank % 2 and rank + 1 < self.num_ranks else ()
        return (0, *chord)
