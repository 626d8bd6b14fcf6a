"""Measurement of the links of all pairs of ranks."""

import json
import socket
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm import PeerError, p2p, store_of
from ...comm.failures import quote
from ...comm.p2p import Transfer
from ...comm.process_groups import create_group
from ...training.arguments import require
from .profile import timed

MOST_RANKS = 64  # 2,016 pairs, one after the other
_SMALL, _LARGE = 1, 2**20  # float32 elements: 4 bytes and 4 MiB
_LONGEST = 3  # times the seconds of one wait, for a pair to connect and to exchange messages
_WARM_UP, _TIMES_SMALL, _TIMES_LARGE = 2, 15, 3


@dataclass(frozen=True)
class PairLinks:
    """What each pair of ranks has measured, one after the other, while both sent and received.

    Args:
        hosts: of each rank.
        rates: (n, n) bytes/s in each direction; equal for both directions.
        latencies: (n, n) seconds of a message of 4 bytes.
        jitters: (n, n) seconds from the tenth part of the fastest to the tenth of the slowest.
        down: why pairs (a, b), a < b, have no link; they are 0 in the matrices.
    """

    hosts: tuple[str, ...]
    rates: Tensor
    latencies: Tensor
    jitters: Tensor
    down: Mapping[tuple[int, int], str] = field(default_factory=dict)

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
        """Return all pairs of ranks that have a link, each once."""
        pairs = combinations(range(self.num_ranks), 2)
        return (pair for pair in pairs if pair not in self.down)

    def median(self, values: Tensor, *, within: bool) -> float | None:
        """Return the median over pairs of ranks within a host, or of two; None: there is none."""
        found = [
            float(values[a, b])
            for a, b in self.pairs()
            if (self.hosts[a] == self.hosts[b]) == within
        ]
        return statistics.median(found) if found else None


def measure_pairs(device: torch.device, seconds: float = 20.0) -> PairLinks:
    """Measure the link of each pair of ranks of the default group, which all call this.

    Over gloo each pair has connections of its own, so that one that fails leaves the others as they
    are: it is in `PairLinks.down` after some seconds. A ValueError for more than ``MOST_RANKS``, a
    `PeerError` if the store or rank 0 is gone; the same result on all ranks.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    rule = f"ranks must be 2 to {MOST_RANKS} to measure all pairs"
    require(2 <= size <= MOST_RANKS, rule, f"{size}; start one rank on each machine")
    store = store_of(None)
    keys = f"links/{store.add(f'links/calls/{rank}', 1)}"
    store.set(f"{keys}/host/{rank}", socket.gethostname())
    for a, b in combinations(range(size), 2):  # one at a time: others would share its link
        pair = f"{keys}/{a}-{b}"
        if rank in (a, b):
            peer = a + b - rank
            found = _measure(keys, pair, peer, device, seconds)
            store.set(f"{pair}/{rank}", json.dumps(found))
            if isinstance(found, list) or store.get(f"{keys}/silent/{peer}") is None:
                store.wait([f"{pair}/{peer}"], _LONGEST * seconds)
            store.set(f"{pair}/end", "")
        else:
            store.wait([f"{pair}/end"], _LONGEST * seconds)
    others = [each for each in range(size) if not store.get(f"{keys}/silent/{each}")]
    store.set(f"{keys}/done/{rank}", "")
    if rank == 0:
        store.wait([f"{keys}/done/{other}" for other in others], seconds)
        store.set(f"{keys}/all", json.dumps(_gather(keys, size)))
    if not store.wait([f"{keys}/all"], 2 * seconds):
        raise PeerError(f"rank {rank}: rank 0 did not respond within {2 * seconds:g} s")
    hosts, columns, down = json.loads(store.get(f"{keys}/all") or "")
    store.set(f"{keys}/read/{rank}", "")
    if rank == 0:  # its process may host the store
        store.wait([f"{keys}/read/{each}" for each in others], seconds)
    rates, latencies, jitters = torch.tensor(columns, dtype=torch.float64, device="cpu")
    reasons = {(a, b): why for a, b, why in down}
    return PairLinks(tuple(hosts), rates, latencies, jitters, reasons)


def _measure(
    keys: str, pair: str, peer: int, device: torch.device, seconds: float
) -> list[float] | str:
    """Return rate, latency and jitter of the link to a rank, or why there is none."""
    store, rank = store_of(None), dist.get_rank()
    store.set(f"{pair}/here/{rank}", "")
    silent = f"{keys}/silent/{peer}"
    if store.get(silent) is not None or not store.wait([f"{pair}/here/{peer}"], seconds):
        store.set(silent, "silent")
        return f"rank {peer} did not respond within {seconds:g} s"
    try:
        group = None
        if device.type == "cpu":
            connecting = timedelta(seconds=seconds / 5)  # gloo tries five times
            group = create_group(sorted([rank, peer]), None, "gloo", timeout=connecting)
        # NCCL ends this process where a message takes longer than the timeout of the default group.
        timeout = timedelta(0) if group is None else timedelta(seconds=seconds)
        small = _times(peer, _SMALL, _TIMES_SMALL, device, group, timeout)
        large = min(_times(peer, _LARGE, _TIMES_LARGE, device, group, timeout))
        if group is not None:
            dist.destroy_process_group(group)
    except RuntimeError as error:
        return quote(error).partition(" [")[0]  # without an address, which may be that of either
    latency = statistics.median(small)
    tenths = statistics.quantiles(small, n=10, method="inclusive")
    rate = 4 * _LARGE / max(large - min(small), large / 2)
    return [rate, latency, tenths[8] - tenths[0]]


def _gather(keys: str, size: int) -> tuple[list[str], list[Any], list[tuple[int, int, str]]]:
    """Return hosts, the means of both ranks of each pair, and pairs without a link."""
    store, down = store_of(None), []
    means = torch.zeros(3, size, size, dtype=torch.float64, device="cpu")
    for a, b in combinations(range(size), 2):
        texts = {each: store.get(f"{keys}/{a}-{b}/{each}") for each in (a, b)}
        rows = [
            f"rank {each} did not respond" if text is None else json.loads(text)
            for each, text in texts.items()
        ]
        reasons = [row for row in rows if isinstance(row, str)]
        if reasons:
            down.append((a, b, reasons[0]))
        else:
            mean = torch.tensor(rows, dtype=torch.float64, device="cpu").mean(0)
            means[:, a, b] = means[:, b, a] = mean
    hosts = [store.get(f"{keys}/host/{each}") or "?" for each in range(size)]
    return hosts, means.tolist(), down


def _times(
    peer: int,
    numel: int,
    count: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    timeout: timedelta,
) -> Sequence[float]:
    """Return the seconds of exchanges with a rank, each way at once."""
    sent, received = torch.zeros(2, numel, device=device)
    place = peer if group is None else dist.get_group_rank(group, peer)

    def exchange() -> None:
        for work in p2p.start(group, [Transfer(place, sent)], [Transfer(place, received)]):
            work.wait(timeout)

    return [timed(exchange, device) for _ in range(_WARM_UP + count)][_WARM_UP:]
