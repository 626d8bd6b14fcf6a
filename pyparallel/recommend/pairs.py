"""Measurement of the links of all pairs of ranks."""

import socket
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.consistency import gather_rows
from ..training.arguments import require
from .profile import timed

MOST_RANKS = 64  # 2,016 pairs, one after the other
_SMALL, _LARGE = 1, 2**20  # float32 elements: 4 bytes and 4 MiB
_WARM_UP, _TIMES_SMALL, _TIMES_LARGE = 2, 15, 3


@dataclass(frozen=True)
class PairLinks:
    """What each pair of ranks has measured, one after the other, while both sent and received.

    Args:
        hosts: of each rank.
        rates: (n, n) bytes/s in each direction; equal for both directions.
        latencies: (n, n) seconds of a message of 4 bytes.
        jitters: (n, n) seconds from the tenth part of the fastest to the tenth of the slowest.
    """

    hosts: tuple[str, ...]
    rates: Tensor
    latencies: Tensor
    jitters: Tensor

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.hosts)

    @property
    def ranks_per_host(self) -> int:
        """Return how many consecutive ranks each host has; 1 if they are not equally many."""
        size = self.hosts.count(self.hosts[0])
        blocks = [self.hosts[at : at + size] for at in range(0, self.num_ranks, size)]
        names = [block[0] for block in blocks]
        fits = all(block == (block[0],) * size for block in blocks)
        return size if fits and len(set(names)) == len(names) else 1

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Return all pairs of ranks, each once."""
        return combinations(range(self.num_ranks), 2)

    def median(self, values: Tensor, *, within: bool) -> float | None:
        """Return the median over pairs of ranks within a host, or of two; None: there is none."""
        found = [
            float(values[a, b])
            for a, b in self.pairs()
            if (self.hosts[a] == self.hosts[b]) == within
        ]
        return statistics.median(found) if found else None


def measure_pairs(device: torch.device) -> PairLinks:
    """Measure the link of each pair of ranks of the default group, which all call this.

    A ValueError for more than ``MOST_RANKS``; the same result on all ranks.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    rule = f"ranks must be 2 to {MOST_RANKS} to measure all pairs"
    require(2 <= size <= MOST_RANKS, rule, f"{size}; start one rank on each machine")
    found = torch.zeros(3, size, size, dtype=torch.float64, device="cpu")
    for a, b in combinations(range(size), 2):
        dist.barrier()  # one pair at a time: others would share its link
        if rank in (a, b):
            peer = a + b - rank
            small = _times(peer, _SMALL, _TIMES_SMALL, device)
            large = min(_times(peer, _LARGE, _TIMES_LARGE, device))
            latency = statistics.median(small)
            tenths = statistics.quantiles(small, n=10, method="inclusive")
            rate = 4 * _LARGE / max(large - min(small), large / 2)
            columns = [rate, latency, tenths[8] - tenths[0]]
            row = torch.tensor(columns, dtype=torch.float64, device="cpu")
            found[:, a, b] += row / 2
            found[:, b, a] += row / 2
    total = found.to(device)
    dist.all_reduce(total)  # each pair has measured twice, on both of its ranks
    return PairLinks(_gather_hosts(), *total.cpu())


def _times(peer: int, numel: int, count: int, device: torch.device) -> Sequence[float]:
    """Return the seconds of exchanges with a rank, each way at once."""
    sent, received = torch.zeros(2, numel, device=device)

    def exchange() -> None:
        sends = dist.P2POp(dist.isend, sent, peer)
        receives = dist.P2POp(dist.irecv, received, peer)
        for work in dist.batch_isend_irecv([receives, sends]):
            work.wait()

    return [timed(exchange, device) for _ in range(_WARM_UP + count)][_WARM_UP:]


def _gather_hosts() -> tuple[str, ...]:
    encoded = socket.gethostname().encode()[:256].ljust(256, b"\0")
    rows = gather_rows(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), None)
    return tuple(bytes(row.tolist()).rstrip(b"\0").decode() for row in rows)
