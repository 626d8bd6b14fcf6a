"""The report of ``doctor --links``: what all pairs of ranks have measured, and what to set."""

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ..comm import wait_for_store
from ..planning.recommend.pairs import PairLinks, measure_pairs
from .text_table import aligned

_MOST_COLUMNS = 8
_SLOW = 0.7  # of the median rate, below which an edge is named
_MBIT, _MILLISECOND = 8 / 1e6, 1e3
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_TIMEOUT = timedelta(seconds=60)  # for all ranks to join, and of NCCL's messages
_MANY = 100  # ranks, from which gloo should connect only those that communicate


def report_links(out: Path | None) -> str:
    """Measure under torchrun, and return the report; empty on ranks other than 0."""
    if "RANK" not in os.environ:
        raise ValueError(
            "--links needs the ranks of a run, got one process: start the command by torchrun, "
            "torchrun --nnodes 2 --nproc-per-node 1 ... -m pyparallel doctor --links"
        )
    is_gpu = torch.cuda.is_available()
    if is_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    wait_for_store()
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # a pair that cannot connect fails alone
    dist.init_process_group("nccl" if is_gpu else "gloo", timeout=_TIMEOUT)
    try:
        found = measure_pairs(torch.device("cuda" if is_gpu else "cpu"))
        if dist.get_rank() != 0:
            return ""
        lines = describe(found, "nccl" if is_gpu else "gloo")
        if out is not None and found.down:
            lines.append(f"{out} is not written: simulate needs the links of all pairs")
        elif out is not None:
            out.write_text(to_toml(found))
            lines.append(f"written to {out}, for python -m pyparallel simulate --links")
        return "\n".join(lines)
    finally:
        dist.destroy_process_group()


def describe(found: PairLinks, backend: str) -> list[str]:
    """Return the lines of the report."""
    hosts = dict.fromkeys(found.hosts)
    machines = "1 machine" if len(hosts) == 1 else f"{len(hosts)} machines"
    head = f"links of {found.num_ranks} ranks on {machines}, {backend}, one pair after the other"
    lines = [head, "", *_tables(found), *_down_lines(found), *_slow_lines(found), "", "what is set"]
    return lines + [f"  {line}" for line in _settings(found.num_ranks, len(hosts), backend)]


def _tables(found: PairLinks) -> Iterator[str]:
    if found.num_ranks <= _MOST_COLUMNS:
        ranks = range(found.num_ranks)
        for name, values, scale, digits in (
            ("Mbit/s each way", found.rates, _MBIT, 0),
            ("ms of a message", found.latencies, _MILLISECOND, 2),
            ("ms of jitter", found.jitters, _MILLISECOND, 2),
        ):
            rows = [(name, *(f"rank {rank}" for rank in ranks))]
            rows += [
                (
                    f"rank {a}",
                    *(
                        ""
                        if a == b
                        else "down"
                        if (min(a, b), max(a, b)) in found.down
                        else f"{values[a, b] * scale:,.{digits}f}"
                        for b in ranks
                    ),
                )
                for a in ranks
            ]
            yield from aligned(rows)
            yield ""
        return
    rows = [("median", "Mbit/s each way", "ms of a message", "ms of jitter")]
    for name, within in (("inside a machine", True), ("between machines", False)):
        columns = (
            (found.rates, _MBIT, 0),
            (found.latencies, _MILLISECOND, 2),
            (found.jitters, _MILLISECOND, 2),
        )
        if found.median(found.rates, within=within) is not None:
            rows.append((name, *(_median(found, *column, within=within) for column in columns)))
    yield from aligned(rows)
    yield ""


def _median(found: PairLinks, values: torch.Tensor, scale: float, digits: int, within: bool) -> str:
    return f"{(found.median(values, within=within) or 0.0) * scale:,.{digits}f}"


def slow_edges(found: PairLinks) -> list[tuple[int, int]]:
    """Return the pairs that are slower than most of their kind."""
    usual = {within: found.median(found.rates, within=within) for within in (True, False)}
    return [
        (a, b)
        for a, b in found.pairs()
        if found.rates[a, b] < _SLOW * (usual[found.hosts[a] == found.hosts[b]] or 0.0)
    ]


def _down_lines(found: PairLinks) -> Iterator[str]:
    if not found.down:
        return
    yield "pairs of ranks without a link"
    for (a, b), why in list(found.down.items())[:_MOST_COLUMNS]:
        yield f"  {a} and {b} ({found.hosts[a]}, {found.hosts[b]}): {why}"
    if len(found.down) > _MOST_COLUMNS:
        yield f"  and {len(found.down) - _MOST_COLUMNS} more"
    yield "open all TCP ports between these hosts, or set GLOO_SOCKET_IFNAME to an interface by"
    yield "which they reach each other; a rank that did not respond died or was stopped"
    yield ""


def _slow_lines(found: PairLinks) -> list[str]:
    slow = slow_edges(found)
    if not slow:
        return [f"no pair is slower than {_SLOW:.0%} of the median of its kind"]
    named = [
        f"{a} and {b} ({found.hosts[a]}, {found.hosts[b]}): {found.rates[a, b] * _MBIT:,.0f} Mbit/s"
        for a, b in sorted(slow, key=lambda pair: float(found.rates[pair]))[:_MOST_COLUMNS]
    ]
    more = [f"and {len(slow) - len(named)} more"] if len(slow) > len(named) else []
    return ["slow pairs of ranks", *(f"  {line}" for line in [*named, *more])]


def _settings(num_ranks: int, num_hosts: int, backend: str) -> Iterator[str]:
    name = f"{backend.upper()}_SOCKET_IFNAME"
    yield f"{name}: {os.environ.get(name, 'not set')}"
    if backend == "gloo" and name not in os.environ:
        address = _own_address()
        yield f"this machine's name is {address} ({_interface_of(address)}), which gloo takes"
        if num_hosts > 1 and address.startswith("127."):
            yield f"  other machines cannot reach it: set {name} to a network's interface"
    if backend == "gloo" and num_ranks >= _MANY:
        lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "not set")
        yield f"TORCH_GLOO_LAZY_INIT: {lazy}; 1 connects only ranks that communicate"
    seconds = dist.distributed_c10d.default_pg_timeout.total_seconds()
    yield f"timeout: {seconds:.0f} s, for which ranks wait for one whose link is cut, unless "
    yield "  init_process_group(timeout=...) is given"


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _interface_of(address: str) -> str:
    """Return the interface that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                packed = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, packed)[20:24]
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(found) == address:
                return name
    return "of no interface"


def to_toml(found: PairLinks) -> str:
    """Return the file that ``simulate --links`` reads, in Mbit/s and ms."""
    within, between = (
        (found.median(found.rates, within=each), found.median(found.latencies, within=each))
        for each in (True, False)
    )
    lines = [f"ranks = {found.num_ranks}"]

    def add(pair: tuple[float | None, float | None]) -> None:
        rate, latency = pair
        lines.append(f"rate = {(rate or 0.0) * _MBIT:.1f}")
        lines.append(f"latency = {(latency or 0.0) * _MILLISECOND:.4f}")

    add(within if between[0] is None else between)
    if between[0] is not None and within[0] is not None and found.ranks_per_host > 1:
        lines += ["", "[machines]", f"ranks = {found.ranks_per_host}"]
        add(within)
    for a, b in slow_edges(found):
        lines += ["", "[[slow]]", f"edges = [[{a}, {b}], [{b}, {a}]]"]
        add((float(found.rates[a, b]), float(found.latencies[a, b])))
    return "\n".join(lines) + "\n"
