"""The default process group of an epoch, made again in the same processes."""

import datetime
import json
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

# No public names, which mypy asks for.
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # re-exports

from ...comm.consistency import gather_rows
from ...comm.failures import disconnect
from .decision import Epoch
from .ledger import Account


class EpochGroup:
    """One gloo group at a time, whose first member hosts its store.

    Attributes:
        server: this process's store, which serves the epochs in which it is the first member.
    """

    def __init__(self) -> None:
        self.server = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        self._group: Callable[[], Any] = lambda: None  # a reference to the default group made here

    def begin(self, epoch: Epoch, identity: str, seconds: float) -> None:
        """Make the group of an epoch, whose calls end after some seconds."""
        timeout = datetime.timedelta(seconds=seconds)
        rank = epoch.members.index(identity)
        store: Any = self.server
        if rank > 0:
            store = TCPStore(*epoch.address, is_master=False, timeout=timeout)
        prefix = f"epoch {epoch.number} of {' '.join(epoch.members)}"
        dist.init_process_group(
            "gloo",
            store=PrefixStore(prefix, store),
            rank=rank,
            world_size=len(epoch.members),
            timeout=timeout,
        )
        self._group = weakref.ref(dist.group.WORLD)

    def end(self) -> None:
        """Disconnect, so that no rank waits for this one, and destroy the group if there is one."""
        if dist.is_initialized() and self._group() is dist.group.WORLD:
            disconnect(None)
            dist.destroy_process_group()


def gather_accounts(account: Account, epoch: Epoch) -> dict[str, Account]:
    """Return the accounts of all members, which call this together."""
    encoded = json.dumps(asdict(account)).encode()
    length = torch.tensor([len(encoded)], dtype=torch.int64, device="cpu")
    lengths = gather_rows(length, None).flatten().tolist()
    padded = bytearray(encoded.ljust(max(lengths)))
    rows = gather_rows(torch.frombuffer(padded, dtype=torch.uint8), None)
    found = [Account(**json.loads(bytes(row.tolist()))) for row in rows]
    return dict(zip(epoch.members, found, strict=True))
