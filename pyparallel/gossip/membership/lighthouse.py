"""Membership by torchft's lighthouse."""

import contextlib
import os
import socket
import uuid
from collections.abc import Callable
from datetime import timedelta
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import override

from ...training.arguments import require
from .base import Change, Membership

ADDRESS, REPLICA, REPLICAS = "PYPARALLEL_LIGHTHOUSE", "PYPARALLEL_REPLICA", "PYPARALLEL_REPLICAS"
HEARTBEAT_TIMEOUT = 0.7
_HEARTBEAT_SECONDS = 0.1
_RPC_SECONDS = 5.0
_SETTLING_SECONDS = 2.0
_JOIN_TIMEOUT_MS = 600_000  # for which a member that is alive and computes is waited for


class Lighthouse(Membership):
    """Membership by the lighthouse of torchft (``pip install "pyparallel-torch[elastic]"``).

    ``python -m pyparallel launch`` starts one and sets the environment variables that are the
    defaults here. On a cluster run ``torchft_lighthouse --min_replicas 1 --join_timeout_ms 600000
    --heartbeat_timeout_ms 700`` on a machine that stays.

    While it cannot be reached training continues, and members cannot change until it is back.

    Args:
        address: "http://host:port" of the lighthouse; None: $PYPARALLEL_LIGHTHOUSE.
        name: as of `Membership`; None: $PYPARALLEL_REPLICA, or one of this process.
        start: as of `Membership`; None: $PYPARALLEL_REPLICAS, or 1, also of a process that torchrun
            has started again.
        deadline: as of `Membership`.
        on_change: as of `Membership`.
        leaves_on_sigterm: as of `Membership`.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        name: str | None = None,
        start: int | None = None,
        deadline: float = 10.0,
        on_change: Callable[[Change], object] | None = None,
        leaves_on_sigterm: bool = True,
    ) -> None:
        if name is None:
            name = os.environ.get(REPLICA) or f"{socket.gethostname()}-{os.getpid()}"
        if start is None:  # one that torchrun has started again does not wait for others
            is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            start = int(os.environ.get(REPLICAS, "1")) if is_first else 1
        super().__init__(
            name,
            start=start,
            deadline=deadline,
            on_change=on_change,
            leaves_on_sigterm=leaves_on_sigterm,
        )
        self.address = address or os.environ.get(ADDRESS, "")
        parts = urlsplit(self.address)
        rule = (
            "address must be that of a lighthouse, such as http://host:29510, or "
            "PYPARALLEL_LIGHTHOUSE must be set, as `python -m pyparallel launch` does"
        )
        require(parts.scheme == "http" and parts.port is not None, rule, repr(self.address))
        self.hint = (
            f": check that the lighthouse runs at {self.address}, which {ADDRESS} sets, and that "
            f"`nc -vz {parts.hostname} {parts.port}` reaches it from this host"
        )
        _torchft()
        self._identity = ""
        self._is_closed = Event()
        self._client: Any = None
        self._answered = False

    @staticmethod
    def serve(bind: str = "0.0.0.0:0", *, heartbeat_timeout: float = HEARTBEAT_TIMEOUT) -> Any:
        """Start a lighthouse in this process; return the server: ``address()``, ``shutdown()``.

        Args:
            bind: address and port; port 0: any that is free.
            heartbeat_timeout: seconds after which a process that sends no heartbeat is dead.
        """
        return _torchft().LighthouseServer(
            bind=bind,
            min_replicas=1,
            join_timeout_ms=_JOIN_TIMEOUT_MS,
            heartbeat_timeout_ms=round(1000 * heartbeat_timeout),
        )

    @override
    def open(self, identity: str) -> str:
        self._identity = identity
        self._is_closed.clear()
        self._thread = Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()
        parts = urlsplit(self.address)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect((parts.hostname or "", parts.port or 0))
            return str(probe.getsockname()[0])

    @override
    def poll(self, text: str) -> dict[str, str] | None:
        try:
            if self._client is None:
                client = self._connect()
                # One that has just started knows nobody: heartbeats of all come before a quorum.
                self._is_closed.wait(_SETTLING_SECONDS * self._answered)
                self._client = client
            quorum = self._client.quorum(
                self._identity, timedelta(seconds=_RPC_SECONDS), address=text
            )
        except (RuntimeError, TimeoutError, ConnectionError):  # reported by the trainer
            self._client = None
            self._is_closed.wait(_HEARTBEAT_SECONDS)
            return None
        self._answered = True
        return {participant.replica_id: participant.address for participant in quorum.participants}

    @override
    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _connect(self) -> Any:
        return _torchft().LighthouseClient(self.address, timedelta(seconds=2))

    def _beat(self) -> None:
        client: Any = None
        while not self._is_closed.wait(_HEARTBEAT_SECONDS):
            with contextlib.suppress(RuntimeError, TimeoutError, ConnectionError):
                client = client or self._connect()
                client.heartbeat(self._identity, timedelta(seconds=1))


def new_identity(name: str) -> str:
    """Return the identity of a process: its name, and a text that no other process has."""
    return f"{name}:{uuid.uuid4().hex[:12]}"


def _torchft() -> Any:
    os.environ.setdefault("RUST_LOG", "error")  # else it prints each request
    try:
        from torchft import coordination  # type: ignore[import-untyped]  # has no py.typed
    except ImportError as error:
        raise ImportError(
            'Lighthouse needs torchft, got none; pip install "pyparallel-torch[elastic]"'
        ) from error
    return coordination
