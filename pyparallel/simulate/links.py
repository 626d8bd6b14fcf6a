"""The links between ranks: cards that ranks of a machine or region share, and slow edges."""

import math
import tomllib
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..gossip.topology import Edges
from ..training.arguments import check_integer, check_one_of, require
from .files import Source, Table

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
        all_reduce: "ring", 2 (n - 1) messages one after the other, as gloo's; or "tree", 2 log2(n)
            latencies at the same bytes.
    """

    uplinks: tuple[Uplink, ...]
    slow_edges: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    slow_ranks: dict[int, float] = field(default_factory=dict)
    card: int = 0
    cores: int | None = None
    all_reduce: str = "tree"

    def __post_init__(self) -> None:
        require(self.uplinks, "uplinks must hold at least one", "none")
        sizes = [each.ranks for each in self.uplinks]
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
        source = Source.read(path)
        try:
            values = tomllib.loads(source.text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: {error}") from error
        return _from_toml(source, values, num_ranks)

    @property
    def ranks_per_machine(self) -> int:
        """Return how many consecutive ranks share a card."""
        return self.uplinks[self.card].ranks

    def machine_of(self, ranks: np.ndarray) -> np.ndarray:
        """Return the machines of ranks."""
        found: np.ndarray = ranks // self.ranks_per_machine
        return found

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

    def all_reduce_seconds(self, num_bytes: float, num_ranks: int, group: int) -> float:
        """Return the seconds of an all-reduce in each group of consecutive ranks, the slowest's."""
        if group == 1:
            return 0.0
        ranks = np.arange(num_ranks)
        following = ranks - ranks % group + (ranks + 1) % group
        ring = Edges.of(ranks, following, np.full(num_ranks, 0.5), num_ranks)
        part = self.seconds(ring, num_bytes / group, num_ranks)
        if self.all_reduce == "ring":
            return float(2 * (group - 1) * part.max())
        latency = self.seconds(ring, 0.0, num_ranks).max()
        bytes_seconds = 2 * (group - 1) * (part - self.seconds(ring, 0.0, num_ranks)).max()
        return float(2 * math.ceil(math.log2(group)) * latency + bytes_seconds)


def _from_toml(source: Source, values: dict[str, Any], num_ranks: int) -> Links:
    top = Table(source, values)
    top.check_names(("ranks", "rate", "latency", "all_reduce", "machines", "regions", "slow"))
    if top.integer("ranks", num_ranks) != num_ranks:
        top.fail(f"ranks must be the run's {num_ranks}, got {values['ranks']}", "ranks")
    if (algorithm := values.get("all_reduce", "tree")) not in ("ring", "tree"):
        top.fail(f"all_reduce must be 'ring' or 'tree', got {algorithm!r}", "all_reduce")
    uplinks, sizes, cores = [], {"machines": 1, "regions": num_ranks}, None
    tables = {name: Table(source, values[name], name) for name in sizes if name in values}
    for name, table in tables.items():
        table.check_names(("ranks", "rate", "latency", *(["cores"] * (name == "machines"))))
        sizes[name] = table.integer("ranks")
        rule = f"ranks of {name} must divide the {num_ranks} ranks"
        if name == "regions":
            rule += f" and be a multiple of a machine's {sizes['machines']}"
        if num_ranks % sizes[name] or sizes[name] % sizes["machines"]:
            table.fail(f"{rule}, got {sizes[name]}", "ranks")
    if "machines" in tables and sizes["machines"] > 1:
        uplinks.append(_uplink(tables["machines"], 1))
        if "cores" in values["machines"]:
            cores = tables["machines"].integer("cores")
    uplinks.append(_uplink(top, sizes["machines"]))
    if "regions" in tables and sizes["regions"] > sizes["machines"]:
        uplinks.append(_uplink(tables["regions"], sizes["regions"]))
    card = int("machines" in tables and sizes["machines"] > 1)
    edges, ranks = _slow(source, values.get("slow", []), num_ranks, top)
    return Links(tuple(uplinks), edges, ranks, card, cores, algorithm)


def _uplink(table: Table, ranks: int) -> Uplink:
    rate = MBIT * table.number("rate")
    return Uplink(ranks, rate, MILLISECOND * table.number("latency", 0.0, positive=False))


def _slow(
    source: Source, tables: Any, num_ranks: int, top: Table
) -> tuple[dict[tuple[int, int], tuple[float, float]], dict[int, float]]:
    edges: dict[tuple[int, int], tuple[float, float]] = {}
    ranks: dict[int, float] = {}
    if not isinstance(tables, list):
        top.source.fail("slow must be tables, each [[slow]]", "slow")
    for count, values in enumerate(tables):
        table = Table(source, values, "slow", count)
        table.check_names(("ranks", "computing", "edges", "rate", "latency"))
        if ("edges" in values) == ("ranks" in values):
            table.fail("slow must have edges with a rate, or ranks with computing", "")
        key = "edges" if "edges" in values else "ranks"
        for each in values[key] if isinstance(values[key], list) else [values[key]]:
            pair = each if key == "edges" else [each]
            fits = isinstance(pair, list) and len(pair) == 1 + (key == "edges")
            if not fits or not all(type(r) is int and 0 <= r < num_ranks for r in pair):
                kind = "pairs of ranks" if key == "edges" else "ranks"
                table.fail(f"{key} must be {kind} from 0 to {num_ranks - 1}, got {each!r}", key)
            if key == "ranks":
                ranks[each] = table.number("computing")
            else:
                latency = MILLISECOND * table.number("latency", 0.0, positive=False)
                edges[pair[0], pair[1]] = MBIT * table.number("rate"), latency
    return edges, ranks
