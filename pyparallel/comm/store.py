"""A process group's store: calls with a deadline, and flags that ranks raise for each other in it.

torch's TCPStore waits for its server without a deadline in most calls, and holds a lock meanwhile:
a stopped server, or a link that is cut, would block a rank for ever.
"""

import os
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist

# The last is no public name, which mypy asks for.
from torch.distributed import PrefixStore, TCPStore, distributed_c10d  # type: ignore[attr-defined]  # re-exports

from .errors import PeerError

Result = TypeVar("Result")

_SHORTEST_POLL, _LONGEST_POLL = 0.001, 0.05  # seconds between two looks at keys awaited

# The connection to the store of each default group.
_connections: "weakref.WeakKeyDictionary[Any, _Connection]" = weakref.WeakKeyDictionary()


def store_of(process_group: dist.ProcessGroup | None) -> "DeadlineStore":
    """Return the store of a process group, whose calls end within the group's timeout.

    All groups of a process share one connection, not torch's, and one thread. None: the default.
    """
    seconds = timeout_of(process_group).total_seconds()
    world: Any = dist.group.WORLD
    group: Any = process_group or world
    connection = _connections.get(world)
    if connection is None:
        connection = _connections[world] = _Connection(world.get_group_store())
    prefix = "" if group is world else f"{group.group_name}/"
    return DeadlineStore(connection, prefix, seconds, dist.get_rank())


def timeout_of(process_group: dist.ProcessGroup | None) -> timedelta:
    """Return the timeout of a process group. None: the default one; none is a RuntimeError."""
    group: Any = process_group or dist.group.WORLD
    if group is None:
        raise RuntimeError("the default process group must exist, got none")
    # torch gives new groups the backend's default, half an hour, and has no public getter.
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


class DeadlineStore:
    """A store whose calls end within a deadline, also if its server is stopped or unreachable.

    After a call has failed, every later call of the process fails at once.
    """

    def __init__(self, connection: "_Connection", prefix: str, seconds: float, rank: int) -> None:
        self._connection, self._prefix = connection, f"pyparallel/{prefix}"
        self._seconds, self._rank = seconds, rank

    @property
    def host_rank(self) -> int | None:
        """Return the global rank whose process hosts the store; None: unknown, or no rank's."""
        return 0 if self._connection.host.endswith("(rank 0)") else None

    @property
    def may_be_here(self) -> bool:
        """Return whether the store may end with this process: rank 0 hosts it without torchrun."""
        host = self._connection.host
        return self._rank == 0 and host != "" and not host.endswith("(torchrun)")

    def set(self, key: str, text: str) -> None:
        """Set a key; a TCPStore does not confirm it. A store that is gone is a PeerError."""
        key = self._prefix + key
        self._call(lambda store: store.set(key, text))

    def get(self, key: str) -> str | None:
        """Return the text of a key, or None if it is not set; does not wait for it."""
        key = self._prefix + key
        text = self._call(lambda store: store.get(key) if store.check([key]) else None)
        return None if text is None else text.decode()

    def setdefault(self, key: str, text: str) -> str:
        """Set a key unless it is set, atomically; return its text."""
        key = self._prefix + key
        value: bytes = self._call(lambda store: store.compare_set(key, "", text))
        return value.decode()

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, atomically; return its new value."""
        key = self._prefix + key
        return int(self._call(lambda store: store.add(key, amount)))

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait until all keys are set, at most some seconds; return whether they are."""
        names = [self._prefix + key for key in keys]
        end, pause = time.monotonic() + seconds, _SHORTEST_POLL
        while not self._call(lambda store: store.check(names)):  # its wait() has no deadline
            if time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)
        return True

    def _call(self, function: "Callable[[Any], Result]") -> Result:
        problem = self._connection.problem
        if problem is None:
            try:
                return self._connection.call(function, self._seconds)
            except Empty:
                problem = f"did not respond within the timeout of {self._seconds:g} s"
            except RuntimeError as error:
                problem = f"failed ({str(error).splitlines()[0]})"
            self._connection.problem = problem
        raise PeerError(
            f"rank {self._rank}: the process group's store {problem}: the process that hosts it"
            f"{self._connection.host} died, was stopped or cannot be reached"
        )


class _Connection:
    """A store of a default group that a thread calls, so that a call can be given up."""

    def __init__(self, store: Any) -> None:
        self.problem: str | None = None  # of a call that has failed
        self.host = _host_of(store)
        self._calls: SimpleQueue[Any] = SimpleQueue()
        # A daemon: one that is blocked must not keep the process.
        Thread(target=_serve, args=(store, self._calls), name="store", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def call(self, function: Callable[[Any], Result], seconds: float) -> Result:
        """Return function(store); raises its error, or ``queue.Empty`` after some seconds."""
        reply: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()
        self._calls.put((function, reply))
        result: Result
        result, error = reply.get(timeout=seconds)
        if error is not None:
            raise error
        return result


def _serve(store: Any, calls: "SimpleQueue[Any]") -> None:
    is_own = False
    while (call := calls.get()) is not None:
        function, reply = call
        try:
            # A blocked call holds the lock of its TCPStore, which is not to be the user's.
            if not is_own and isinstance(_root_of(store), TCPStore):
                store = store.clone()
            is_own = True
            reply.put((function(store), None))
        except Exception as error:
            reply.put((None, error))
        del call, function, reply  # not kept until the next call


def _root_of(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _host_of(store: Any) -> str:
    """Return the address of a TCPStore's server, and its process if the launch tells."""
    root = _root_of(store)
    if not isinstance(root, TCPStore):
        return ""
    where = f" at {root.host}:{root.port}"
    method = getattr(distributed_c10d, "_default_pg_init_method", None) or ""
    if method.startswith("env://") and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return f"{where} (torchrun)"
    return f"{where} (rank 0)" if method.startswith(("env://", "tcp://")) else where
