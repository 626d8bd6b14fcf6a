"""Networks between ranks: this machine's loopback, or rate-limited links between namespaces."""

import ctypes
import os
import random
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "loopback"
CLONE_NEWNET = 0x40000000
HOLD = ["unshare", "--net", "sh", "-c", "echo ready; exec cat"]
# Packets merged for the network card have up to 64 KiB, which must fit into the token bucket.
BURST, LATENCY = "256kb", "50ms"


@dataclass(frozen=True)
class Rendezvous:
    """Address, interface and namespaces over which the ranks of a run connect."""

    host: str
    port: int
    interface: str
    # The file of each rank's network namespace; empty: all use the current one
    namespaces: Sequence[str] = ()
    bridge: int | None = None  # the process that holds the namespace of the bridge between them

    def enter(self, rank: int) -> None:
        """Move the calling thread to its rank's namespace; threads started later inherit it."""
        if self.namespaces:
            libc = ctypes.CDLL(None, use_errno=True)
            with open(self.namespaces[rank], "rb") as namespace:
                if libc.setns(namespace.fileno(), CLONE_NEWNET):
                    number = ctypes.get_errno()
                    raise OSError(number, os.strerror(number), self.namespaces[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface


@contextmanager
def loopback() -> Iterator[Rendezvous]:
    yield Rendezvous("127.0.0.1", free_port(), "lo")


def free_port() -> int:
    """Return a port below those that the kernel gives to connections: it stays free until used."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(first // 2, first)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:  # nobody listens
                return port


@contextmanager
def limited_links(num_ranks: int, mbit_per_s: int, ranks_per_node: int = 1) -> Iterator[Rendezvous]:
    """Put each node's ranks in a network namespace, on one bridge, with a rate-limited uplink.

    A namespace lives as long as the process that holds it, which ends with its standard input: so
    nothing remains, even if this process is killed.

    Raises:
        RuntimeError: this user may not create namespaces, or a tool is missing.
    """
    with ExitStack() as stack:
        num_nodes = num_ranks // ranks_per_node
        bridge, *nodes = (stack.enter_context(_namespace()) for _ in range(num_nodes + 1))
        _inside(bridge, "ip link add bridge0 up type bridge")
        for node, holder in enumerate(nodes):
            _inside(bridge, f"ip link add port{node} type veth peer name eth0 netns {holder}")
            _inside(bridge, f"ip link set port{node} up master bridge0")
            _inside(holder, "ip link set lo up")
            _inside(holder, f"ip address add 10.0.0.{node + 1}/24 dev eth0")
            _inside(holder, "ip link set eth0 up")
            limit = f"tbf rate {mbit_per_s}mbit burst {BURST} latency {LATENCY}"
            _inside(holder, f"tc qdisc add dev eth0 root {limit}")
        namespaces = [f"/proc/{each}/ns/net" for each in nodes for _ in range(ranks_per_node)]
        # Every port of a new namespace is free.
        yield Rendezvous("10.0.0.1", 29500, "eth0", namespaces, bridge)


def links_of(
    num_ranks: int, rates: Sequence[int]
) -> Iterator[tuple[str, AbstractContextManager[Rendezvous]]]:
    """Yield the loopback, and links of these Mbit/s where this user is root, with their names."""
    yield LOOPBACK, loopback()
    if rates and os.geteuid() != 0:
        print("links of limited rate: not measured, network namespaces need root")
        return
    for rate in rates:
        yield f"{rate} Mbit/s", limited_links(num_ranks, rate)


def read_sent() -> int:
    """Return bytes sent by the interface of this thread's network namespace since it exists."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise RuntimeError(f"no network interface {interface}")


def set_link(place: Rendezvous, rank: int, state: str) -> None:
    """Cut a rank of `limited_links` off (``"down"``), or connect it again (``"up"``)."""
    _inside(place.bridge, f"ip link set port{rank} {state}")


@contextmanager
def _namespace() -> Iterator[int]:
    """Create a network namespace; yield the id of the process that holds it."""
    try:
        process = subprocess.Popen(
            HOLD, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except FileNotFoundError as error:
        raise RuntimeError(f"network namespaces need unshare of util-linux: {error}") from error
    with process:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"no network namespace: {process.stderr.read().strip()}")
        yield process.pid


def _inside(holder: int, command: str) -> None:
    enter = ["nsenter", "--target", str(holder), "--net", *command.split()]
    done = subprocess.run(enter, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
