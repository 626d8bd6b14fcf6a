"""Process groups: groups within a group, a barrier with a clear error, and teardown.

Teardown must let no thread of a gloo group outlive the interpreter. A gloo worker thread that drops
a tensor must take the GIL. If the interpreter is already finalizing, the thread is unwound inside a
``noexcept`` function, and a run with correct results ends with "terminate called without an active
exception". The threads are joined when the last reference to the group is dropped, so nothing may
keep one after ``destroy_process_group()``, and the last reference must be Python's: C++ would join
the threads while holding the GIL.

* ``torch.distributed.nn`` takes ``group=dist.group.WORLD`` as default arguments. Imported after
  ``init_process_group`` (creating an optimizer is enough), its functions hold the group until exit.
  Imported here, before any group exists, they hold None.
* DistributedDataParallel holds the group in C++ too; see ``AllReduceAverager.close`` for the order
  in which it is released.
* If a script never calls ``destroy_process_group()``, it is called at exit.
"""

import atexit
import datetime
import gc
import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .errors import peer_error

importlib.import_module("torch.distributed.nn.functional")  # before any group exists: see above


@atexit.register
def _destroy_gloo_group() -> None:
    gc.collect()
    # A group without gloo needs no teardown; destroying it here could wait for a dead rank.
    if dist.is_initialized() and "gloo" in dist.get_backend_config():
        dist.destroy_process_group()


def warn_if_alone() -> None:
    """Warn at the line that creates a trainer: a launched process has no process group."""
    num_processes = os.environ.get("WORLD_SIZE", "")
    if num_processes.isdecimal() and int(num_processes) > 1 and not dist.is_initialized():
        warnings.warn(
            f"torchrun started {num_processes} processes, but no process group is initialized, so "
            "this process trains alone; call torch.distributed.init_process_group first",
            stacklevel=3,
        )


def new_group(
    members: Sequence[int],
    process_group: dist.ProcessGroup | None,
    backend: str | None = None,
    *,
    for_p2p: bool = False,
) -> dist.ProcessGroup:
    """Return a process group of some ranks of another one, with its backend and timeout.

    All members must call this with the same list, and no other rank may. Disjoint parts of a group
    can be created at the same time, each by its own members. Ranks outside ``process_group`` are
    not involved.

    Args:
        members: ranks within ``process_group``, ascending, including this one.
        process_group: the parent group; None: the default group.
        backend: a backend other than that of ``process_group``.
        for_p2p: sends and receives alone: no collective connects the members of an NCCL group, for
            which it would have another communicator.

    Raises:
        PeerError: a member died or did not connect within the timeout.
        ValueError: the ranks outside ``process_group`` would have to take part.
    """
    parent: Any = process_group or dist.group.WORLD
    _check_split(parent)
    try:
        return _connect(members, parent, backend, for_p2p)
    except RuntimeError as error:
        what = f"a process group of ranks {list(members)} could not be created"
        raise peer_error(dist.get_rank(), None, what, error) from error


def device_of(process_group: dist.ProcessGroup | None) -> torch.device:
    """Return a device whose tensors a group sends: a GPU with NCCL. None: the default group."""
    if "nccl" not in dist.get_backend_config(process_group):
        return torch.device("cpu")
    group: Any = process_group or dist.group.WORLD
    return group.bound_device_id or torch.device("cuda", torch.cuda.current_device())


def check_group_exists() -> None:
    """Check that the process groups have not been destroyed, after which no rank can be reached.

    Raises:
        RuntimeError: they have been.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "the process group must exist in every step, got one after destroy_process_group(); "
            "call that after the last step, or close() a GossipDataParallel to step it alone"
        )


def _check_split(parent: Any) -> None:
    """Check that a group of some ranks of a group can be created by those ranks alone.

    Raises:
        ValueError: NCCL would split the communicator of all ranks, which waits for all of them.
    """
    world: Any = dist.group.WORLD
    bound = getattr(world, "bound_device_id", None)
    if bound is None or not world._get_backend(bound).supports_splitting:
        return
    size, num_ranks = dist.get_world_size(parent), dist.get_world_size()
    if size < num_ranks:
        raise ValueError(
            "process_group must have all ranks if init_process_group was given a device_id, as "
            "NCCL then makes a new group by a call of all ranks, got one of "
            f"{size} of {num_ranks} ranks: leave out device_id"
        )


def _connect(
    members: Sequence[int], parent: Any, backend: str | None, for_p2p: bool
) -> dist.ProcessGroup:
    backend = backend or dist.get_backend_config(parent)
    group: dist.ProcessGroup = dist.new_group(
        [dist.get_global_rank(parent, member) for member in members],
        timeout=timeout_of(parent),
        backend=backend,
        # With local synchronization the name has the members and their number of groups, which
        # must be the same on all. By count alone, parts created at the same time share a name.
        use_local_synchronization=len(members) < dist.get_world_size(),
    )
    # A member that continues and fails would disconnect those still connecting (gloo), and NCCL
    # needs all ranks in a group's first call, while a gossip round may leave some out.
    if not (for_p2p and "nccl" in backend):
        dist.barrier(group)
    return group


def node_of(rank: int, ranks_per_node: int) -> range:
    """Return the ranks of a rank's node, where consecutive ranks share one."""
    first = rank - rank % ranks_per_node
    return range(first, first + ranks_per_node)


def counterparts_of(rank: int, ranks_per_node: int, num_ranks: int) -> range:
    """Return the ranks with the same local rank on every node."""
    return range(rank % ranks_per_node, num_ranks, ranks_per_node)


def timeout_of(process_group: dist.ProcessGroup | None) -> datetime.timedelta:
    """Return the timeout of a process group. None: the default group."""
    group: Any = process_group or dist.group.WORLD
    # torch gives new groups the backend's default, half an hour, and has no public getter.
    timeout: datetime.timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def barrier_of(process_group: dist.ProcessGroup | None) -> Callable[[], None]:
    """Return a barrier: a function that returns once all ranks of the group have called it.

    Raises:
        ValueError: the group has no gloo, whose collectives the host waits for.
    """
    config = dist.get_backend_config(process_group)
    if "gloo" not in config:
        raise ValueError(f"process_group must be one of gloo, got one of {config}")

    def barrier() -> None:
        try:
            dist.all_reduce(torch.zeros(1), group=process_group)
        except RuntimeError as error:
            what = "not all ranks reached the barrier"
            raise peer_error(dist.get_rank(), None, what, error) from error

    return barrier
