"""Topologies that only tests use."""

from pyparallel.gossip.topology import Topology


class StarWithChords(Topology):
    """Irregular: rank 0 sends to all, the others to 0, and each odd rank to the next one too."""

    def out_peers(self, rank, round_index):
        if rank == 0:
            return tuple(range(1, self.num_ranks))
        chord = (rank + 1,) if rank % 2 and rank + 1 < self.num_ranks else ()
        return (0, *chord)
