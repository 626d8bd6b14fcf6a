"""The links between ranks: cards that ranks of a machine or region share, and slow edges."""

import math
import tomllib
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from ...gossip.topology import Edges
from ...training.arguments import check_integer, check_one_of, require
from .files import Table

MBIT, MILLISECOND = 1e6 / 8, 1e-3  # in bytes, in seconds: the units of files


@dataclass(frozen=True)
class Uplink:
    """The link by which each group of consecutive ranks reaches the others.

    Args:
        ranks: of a group; 1: each rank's own link.
        rate: bytes/s in each direction, of all messages of the group together.
        latency: seconds of a message.
    """

    ranks: int
    rate: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        check_integer("ranks of an uplink", self.ranks)
        require(0 < self.rate < math.inf, "rate must be greater than 0 and finite", self.rate)
        require(0 <= self.latency < math.inf, "latency must not be negative", self.latency)


@dataclass(frozen=True)
class Links:
    """All links of a run.

    A message crosses the uplinks of all groups that it leaves or enters: it has the latency of the
    largest of them, and the lowest of their rates, each divided among the messages of the round
    that leave or enter the group. It begins when its sender has sent it and its receiver awaits it.

    Args:
        uplinks: from the smallest groups to the largest, whose numbers of ranks are multiples.
        slow_edges: bytes/s and latency of messages from one rank to another, not shared.
        slow_ranks: how many times as long a rank computes.
        card: which of the uplinks is a machine's network card.
        cores: of a machine; with fewer than ranks, its ranks compute more slowly. None: enough.
        all_reduce: "ring", 2 (n - 1) messages one after the other, as gloo's; or "tree", as many
            bytes with 2 log2(n) latencies, of a machine's or region's uplink for machines or
            regions.
    """

    uplinks: tuple[Uplink, ...]
    slow_edges: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    slow_ranks: dict[int, float] = field(default_factory=dict)
    card: int = 0
    cores: int | None = None
    all_reduce: str = "tree"

    def __post_init__(self) -> None:
        require(self.uplinks, "uplinks must hold at least one", "none")
        sizes = [uplink.ranks for uplink in self.uplinks]
        fits = all(b % a == 0 and b > a for a, b in pairwise(sizes))
        require(fits, "ranks of uplinks must be multiples of those before", str(sizes))
        require(0 <= self.card < len(sizes), "card must be one of the uplinks", self.card)
        check_one_of("all_reduce", self.all_reduce, ("ring", "tree"))

    @classmethod
    def uniform(cls, rate: float, latency: float = 0.0, all_reduce: str = "tree") -> "Links":
        """Return equal links, one for each rank."""
        return cls((Uplink(1, rate, latency),), all_reduce=all_reduce)

    @classmethod
    def read(cls, path: Path, num_ranks: int) -> "Links":
        """Read a TOML file, in Mbit/s and ms; a ValueError names the line of a mistake."""
        return _from_toml(Table.read(path, tomllib.loads), num_ranks)

    @property
    def ranks_per_machine(self) -> int:
        """Return how many consecutive ranks share a card."""
        return self.uplinks[self.card].ranks

    def computing(self, num_ranks: int) -> np.ndarray:
        """Return how many times as long each rank computes as one that is alone on a machine."""
        busy = min(self.ranks_per_machine, num_ranks) / (self.cores or math.inf)
        factors = np.full(num_ranks, max(1.0, busy))
        for rank, factor in self.slow_ranks.items():
            factors[rank] *= factor
        return factors

    def seconds(self, edges: Edges, num_bytes: float, num_ranks: int) -> np.ndarray:
        """Return the seconds of each message of a round, (m,), all of ``num_bytes``."""
        rates, latencies = np.full(len(edges.senders), np.inf), np.zeros(len(edges.senders))
        for uplink in self.uplinks:
            sender, receiver = edges.senders // uplink.ranks, edges.receivers // uplink.ranks
            crosses = sender != receiver
            num_groups = -(-num_ranks // uplink.ranks)
            leaving = np.bincount(sender[crosses], minlength=num_groups)
            entering = np.bincount(receiver[crosses], minlength=num_groups)
            share = np.maximum(1, np.maximum(leaving[sender], entering[receiver]))
            rates = np.where(crosses, np.minimum(rates, uplink.rate / share), rates)
            latencies = np.where(crosses, uplink.latency, latencies)
        for (a, b), (rate, latency) in self.slow_edges.items():
            is_slow = (edges.senders == a) & (edges.receivers == b)
            rates[is_slow] = np.minimum(rates[is_slow], rate)
            latencies[is_slow] = np.maximum(latencies[is_slow], latency)
        seconds: np.ndarray = latencies + num_bytes / rates
        return seconds

    def all_reduce_seconds(
        self, num_bytes: float, num_ranks: int, group: int, num_stages: int = 1
    ) -> float:
        """Return the seconds of an all-reduce in each group of consecutive ranks, the slowest's.

        With stages a group is of the same stage of consecutive replicas. In a ring a part of the
        data goes around twice, while each link carries all parts in turn.
        """
        if group == 1:
            return 0.0
        ranks = np.arange(num_ranks)
        replicas, stages = np.divmod(ranks, num_stages)
        following = replicas - replicas % group + (replicas + 1) % group
        shares = np.full(num_ranks, 0.5)
        ring = Edges.of(ranks, following * num_stages + stages, shares, num_ranks)
        shape = -1, group, num_stages
        latencies = self.seconds(ring, 0.0, num_ranks).reshape(shape)
        sending = self.seconds(ring, num_bytes / group, num_ranks).reshape(shape) - latencies
        if self.all_reduce == "ring":
            around = (latencies + sending).mean(1)
            return float(2 * (group - 1) * np.maximum(around, sending.max(1)).max())
        replicas_of = [max(1, uplink.ranks / num_stages) for uplink in self.uplinks]
        sizes = [*(min(each, group) for each in replicas_of), group]
        counts = [b / a for a, b in pairwise(sizes)]
        levels = zip(self.uplinks, counts, strict=True)
        latency = sum(math.ceil(math.log2(count)) * each.latency for each, count in levels)
        return float(2 * latency + 2 * (group - 1) * sending.max())


def _from_toml(top: Table, num_ranks: int) -> Links:
    top.check_names(("ranks", "rate", "latency", "all_reduce", "machines", "regions", "slow"))
    if (given := top.integer("ranks", num_ranks)) != num_ranks:
        top.fail(f"ranks must be the run's {num_ranks}, got {given}", "ranks")
    if (algorithm := top.values.get("all_reduce", "tree")) not in ("ring", "tree"):
        top.fail(f"all_reduce must be 'ring' or 'tree', got {algorithm!r}", "all_reduce")
    groups, per_machine, cores = [], 1, None
    for table in top.tables("machines"):
        table.check_names(("ranks", "rate", "latency", "cores"))
        per_machine = _group_size(table, num_ranks, 1)
        groups.append(_uplink(table, 1))
        cores = table.integer("cores") if "cores" in table.values else None
    card = len(groups) if per_machine > 1 else 0
    groups = [*groups[:card], _uplink(top, per_machine)]
    for table in top.tables("regions"):
        table.check_names(("ranks", "rate", "latency"))
        groups.append(_uplink(table, _group_size(table, num_ranks, per_machine)))
    edges: dict[tuple[int, int], tuple[float, float]] = {}
    ranks: dict[int, float] = {}
    for table in top.tables("slow"):
        table.check_names(("ranks", "computing", "edges", "rate", "latency"))
        if not {"ranks", "edges"} & set(table.values):
            table.fail("slow must have edges with a rate, or ranks with computing")
        ranks.update({a: table.number("computing") for (a,) in _places(table, "ranks", num_ranks)})
        for a, b in _places(table, "edges", num_ranks):
            slow = _uplink(table, 1)
            edges[a, b] = slow.rate, slow.latency
    return Links(tuple(groups), edges, ranks, card, cores, algorithm)


def _uplink(table: Table, ranks: int) -> Uplink:
    rate = MBIT * table.number("rate")
    return Uplink(ranks, rate, MILLISECOND * table.number("latency", 0.0, positive=False))


def _group_size(table: Table, num_ranks: int, multiple: int) -> int:
    ranks = table.integer("ranks")
    if num_ranks % ranks or ranks % multiple or (ranks == multiple > 1):
        rule = f"ranks must divide the run's {num_ranks}"
        rule += f" and be several times a machine's {multiple}" if multiple > 1 else ""
        table.fail(f"{rule}, got {ranks}", "ranks")
    return ranks


def _places(table: Table, key: str, num_ranks: int) -> list[list[int]]:
    """Return what a list of ranks, or of pairs of ranks, holds: as lists of ranks."""
    found, length = table.values.get(key, []), 1 + (key == "edges")
    found = found if isinstance(found, list) else [found]
    places = [each if key == "edges" else [each] for each in found]
    for place in places:
        fits = isinstance(place, list) and len(place) == length
        if not fits or not all(type(rank) is int and 0 <= rank < num_ranks for rank in place):
            kind = "pairs of ranks" if key == "edges" else "ranks"
            table.fail(f"{key} must be {kind} from 0 to {num_ranks - 1}, got {place}", key)
    return places
