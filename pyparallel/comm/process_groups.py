"""Process groups: groups within a group, a barrier with a clear error, and teardown.

Teardown must let no thread of a gloo group outlive the interpreter. A gloo worker thread that drops
a tensor must take the GIL. If the interpreter is already finalizing, the thread is unwound inside a
``noexcept`` function, and a run with correct results ends with "terminate called without an active
exception". The threads are joined when the last reference to the group is dropped, so nothing may
keep one after ``destroy_process_group()``, and the last reference must be Python's, in the main
thread: C++ would join the threads while holding the GIL, and another thread joins them, and takes
the GIL again, while Python finalizes.

* ``torch.distributed.nn`` takes ``group=dist.group.WORLD`` as default arguments. Imported after
  ``init_process_group`` (creating an optimizer is enough), its functions hold the group until exit.
  Imported here, before any group exists, they hold None.
* DistributedDataParallel holds the group in C++ too; see ``AllReduceAverager.close`` for the order
  in which it is released.
* A thread that completes a future holds the future's callbacks for a moment after those who wait
  for it go on; see ``once`` in ``compression/hooks/comm_worker.py``.
* If a script never calls ``destroy_process_group()``, it is called at exit.
"""

import atexit
import datetime
import gc
import importlib
import os
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .store import store_of, timeout_of

# Of each default group and list of ranks: how often a group of them was created, and the length of
# torch's list of groups at the last time.
_created: "weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], tuple[int, int]]]"
_created = weakref.WeakKeyDictionary()

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


def create_group(
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

    ``members`` are ranks within ``process_group``, ascending, including this one. ``for_p2p``:
    sends and receives alone, so that no collective connects the members of an NCCL group, for which
    it would have another communicator. A member that died or did not connect within the timeout is
    torch's RuntimeError; gloo waits five times as long for one that died after it had published its
    address.
    """
    parent: Any = process_group or dist.group.WORLD
    _check_split(parent)
    ranks = [dist.get_global_rank(parent, member) for member in members]
    return _connect(ranks, parent, backend, for_p2p)


def device_of(process_group: dist.ProcessGroup | None) -> torch.device:
    """Return a device whose tensors a group sends: a GPU with NCCL. None: the default group."""
    if "nccl" not in dist.get_backend_config(process_group):
        return torch.device("cpu")
    group: Any = process_group or dist.group.WORLD
    return group.bound_device_id or torch.device("cuda", torch.cuda.current_device())


def check_group_exists() -> None:
    """Raise a RuntimeError if the process groups are destroyed: no rank can be reached then."""
    if not dist.is_initialized():
        raise RuntimeError(
            "the process group must exist in every step, got one after destroy_process_group(); "
            "call that after the last step, or close() a GossipDataParallel to step it alone"
        )


def _check_split(parent: Any) -> None:
    """Raise a ValueError if NCCL would split the communicator of all ranks, which waits for all."""
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
    ranks: Sequence[int], parent: Any, backend: str | None, for_p2p: bool
) -> dist.ProcessGroup:
    backend, timeout = backend or dist.get_backend_config(parent), timeout_of(parent)
    # By its count alone, which torch names groups by, parts created at the same time share a name.
    by_ranks = len(ranks) < dist.get_world_size() or _is_named_by_count()
    with _same_name(ranks, timeout) if by_ranks else nullcontext():
        group: dist.ProcessGroup = dist.new_group(
            ranks, timeout=timeout, backend=backend, use_local_synchronization=by_ranks
        )
    # A member that continues and fails would disconnect those still connecting (gloo), and NCCL
    # needs all ranks in a group's first call, while a gossip round may leave some out.
    if not (for_p2p and "nccl" in backend):
        dist.barrier(group)
    return group


@cache
def _is_named_by_count() -> bool:
    """Return whether torch names a group by its ranks and the number of groups created so far.

    So does torch 2.15, while 2.11 and 2.13 take the number of groups that there are.
    """
    names = []
    for count in range(2):
        with _group_count(count):
            names.append(distributed_c10d._hash_ranks_to_str([0]))
    return names[0] != names[1]


@contextmanager
def _group_count(count: int) -> Iterator[None]:
    """Set torch's number of groups created so far, inside alone."""
    world = distributed_c10d._world
    before, world.group_count = world.group_count, count
    try:
        yield
    finally:
        world.group_count = before


@contextmanager
def _same_name(ranks: Sequence[int], timeout: datetime.timedelta) -> Iterator[None]:
    """Have torch give the group of some ranks that is created inside the same new name on each.

    With local synchronization torch names a group by its ranks and a number of groups. Ranks in
    unequal numbers of groups would wait for each other under different names. Where it is the
    number created so far, it is set to one that no other group gets. Where it is the number that
    there are, the others get groups of one rank first, which are destroyed again.
    """
    world: Any = dist.group.WORLD
    created = _created.setdefault(world, {})
    times, last = created.get(tuple(ranks), (0, -1))
    if _is_named_by_count():
        with _group_count(10**9 + times):
            yield
        created[tuple(ranks)] = times + 1, last
        return
    here = len(distributed_c10d._world.pg_names)
    store = store_of(None)
    keys = [f"groups/{'-'.join(map(str, ranks))}/{times}/{rank}" for rank in ranks]
    store.set(keys[ranks.index(dist.get_rank())], str(here))
    if not store.wait(keys, timeout.total_seconds()):
        raise RuntimeError("timed out waiting for its other ranks")
    # Above the last number: its name may still be in use although other groups were destroyed.
    number = max(last + 1, *(int(store.get(key) or 0) for key in keys))
    padding = [
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        for _ in range(number - here)
    ]
    try:
        yield
        created[tuple(ranks)] = times + 1, number
    finally:
        for group in padding:
            dist.destroy_process_group(group)
