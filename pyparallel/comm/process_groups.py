"""Process groups: groups within a group, a barrier with a clear error, and teardown.

Teardown, so that no thread of a gloo group outlives the interpreter: a gloo worker thread that
drops a tensor must take Python's lock. If the interpreter is already
finalizing, the thread is unwound inside a ``noexcept`` function, and a run whose results are all
right ends with "terminate called without an active exception". The threads are joined when the
last reference to the group goes, so nothing may keep one beyond ``destroy_process_group()``, and
that last one must be Python's: C++ would wait for the threads with Python's lock in its hand.

* ``torch.distributed.nn`` takes ``group=dist.group.WORLD`` as default arguments. Imported after
  ``init_process_group`` (creating an optimizer is enough), its functions hold the group for good.
  Imported here, before any group exists, they hold None.
* DistributedDataParallel holds the group in C++ too: ``AllReduceSession.close`` says in which
  order it lets go.
* Who never calls ``destroy_process_group()`` has it called at exit.
"""

import atexit
import datetime
import gc
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .gossip_rounds import PeerError

importlib.import_module("torch.distributed.nn.functional")  # before any group exists: see above


@atexit.register
def _destroy_gloo_group() -> None:
    gc.collect()
    # A group without gloo leaves by itself; destroying it here could wait for a rank that died.
    if dist.is_initialized() and "gloo" in dist.get_backend_config():
        dist.destroy_process_group()


def new_group(
    members: Sequence[int],
    process_group: dist.ProcessGroup | None,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """A process group of some ranks of another one, with its backend and deadline.

    All members must call this, with the same list, and no one else: so ranks of one group can
    split it into parts at the same time, each calling for its own part alone. What ranks outside
    of ``process_group`` do does not matter.

    Args:
        members: ranks as ``process_group`` numbers them, ascending, this one among them.
        process_group: None means the default group.
        backend: another one than that of ``process_group``.

    Raises:
        PeerError: a member died or was silent before all were connected.
    """
    try:
        return _connect(members, process_group or dist.group.WORLD, backend)
    except RuntimeError as error:
        raise PeerError(
            f"rank {dist.get_rank()}: a process group of ranks {list(members)} could not be made: "
            "one died or was silent for the process group's timeout "
            f"({str(error).splitlines()[0]})"
        ) from error


def _connect(members: Sequence[int], parent: Any, backend: str | None) -> dist.ProcessGroup:
    backend = backend or dist.get_backend_config(parent)
    group: dist.ProcessGroup = dist.new_group(
        [dist.get_global_rank(parent, member) for member in members],
        timeout=timeout_of(parent),
        backend=backend,
        # Such a group is named by its members and how many groups each has: all must have as many.
        # A name by count alone would be that of another part, made at the same time.
        use_local_synchronization=len(members) < dist.get_world_size(),
    )
    # A member that went on alone and failed would cut off those still connecting (gloo), and NCCL
    # wants all ranks in a group's first call, where a round may spare some.
    dist.barrier(group)
    return group


def node_of(rank: int, ranks_per_node: int) -> range:
    """The ranks of a rank's node, where consecutive ranks form one."""
    first = rank - rank % ranks_per_node
    return range(first, first + ranks_per_node)


def counterparts_of(rank: int, ranks_per_node: int, num_ranks: int) -> range:
    """The ranks of the same place in every node."""
    return range(rank % ranks_per_node, num_ranks, ranks_per_node)


def timeout_of(process_group: dist.ProcessGroup | None) -> datetime.timedelta:
    """How long a group's ranks wait for each other. None means the default group."""
    group: Any = process_group or dist.group.WORLD
    # torch gives new groups the backend's default, half an hour, and has no public way to ask.
    deadline: datetime.timedelta = group._get_backend(group._device_types[0]).options._timeout
    return deadline


def barrier_of(process_group: dist.ProcessGroup | None) -> Callable[[], None]:
    """A function that returns once all ranks of the group have called it."""

    def barrier() -> None:
        try:
            dist.all_reduce(torch.zeros(1), group=process_group)
        except RuntimeError as error:
            raise PeerError(
                f"rank {dist.get_rank()}: not all ranks came together: one died or was silent for "
                f"the process group's timeout ({str(error).splitlines()[0]})"
            ) from error

    return barrier
