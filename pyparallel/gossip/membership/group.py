"""The default process group of an epoch, made again in the same processes."""

import datetime
import json
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# No public names, which mypy asks for.
from torch.distributed import (  # type: ignore[attr-defined]  # re-exports
    HashStore,
    PrefixStore,
    TCPStore,
)

from ...comm import PeerError
from ...comm.failures import disconnect
from .decision import Epoch

_POLL_SECONDS = 0.002
_CONNECT_SECONDS = 1.5  # for which members that connect wait for one that does not


class EpochGroup:
    """One gloo group at a time, whose first member hosts its store.

    Attributes:
        server: this process's store, which serves the epochs in which it is the first member.
    """

    def __init__(self) -> None:
        self.server = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        self._group: Callable[[], Any] = lambda: None  # a reference to the default group made here
        self._members: tuple[str, ...] = ()  # of the last epoch
        self._seconds = _CONNECT_SECONDS  # that they had to connect

    def begin(
        self,
        epoch: Epoch,
        identity: str,
        seconds: float,
        find_reason: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Make the group of an epoch, whose calls end after some seconds.

        A RuntimeError once there is a reason to leave the epoch, before all members have come, or
        if they do not connect: one may have died meanwhile. If the same members come again they
        have twice the time to.
        """
        timeout = datetime.timedelta(seconds=seconds)
        rank = epoch.members.index(identity)
        self._seconds = 2 * self._seconds if epoch.members == self._members else _CONNECT_SECONDS
        self._members = epoch.members
        connecting = datetime.timedelta(seconds=min(seconds, self._seconds))
        store: Any = self.server
        if rank > 0:
            store = TCPStore(*epoch.address, is_master=False, timeout=connecting)
            store.set_timeout(timeout)
        # Processes that have decided otherwise, also on who was there before, make no group.
        names = epoch.members, sorted(epoch.veterans), sorted(epoch.leaving)
        store = PrefixStore(f"epoch {epoch.number} of {json.dumps(names)}", store)
        end = time.monotonic() + seconds
        store.set(identity, "")
        while not store.check(list(epoch.members)):
            reason = find_reason()
            if reason is not None or time.monotonic() > end:
                raise PeerError(f"not all members have come: {reason or 'Timed out'}")
            time.sleep(_POLL_SECONDS)
        try:
            dist.init_process_group(
                "gloo",
                store=store,
                rank=rank,
                world_size=len(epoch.members),
                timeout=connecting / 5,  # gloo waits five times as long for a connection
            )
        except RuntimeError:
            # torch has counted the group, and names those that it makes by their number: ranks
            # that count differently would wait for each other. destroy_process_group() forgets it.
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            dist.destroy_process_group()
            raise
        group: Any = dist.group.WORLD
        group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)
        self._group = weakref.ref(group)

    def end(self) -> None:
        """Disconnect, so that no rank waits for this one, and destroy the group if there is one."""
        if dist.is_initialized() and self._group() is dist.group.WORLD:
            disconnect(None)
            dist.destroy_process_group()
