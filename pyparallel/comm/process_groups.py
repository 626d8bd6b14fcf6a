"""Process groups: groups within a group, and teardown.

No thread of a gloo group may outlive the interpreter: one that drops a tensor, for which it takes
the GIL, would end a run with "terminate called without an active exception". The threads are joined
when the last reference to the group is dropped. So nothing may keep one after
``destroy_process_group()``, and the last must be Python's, in the main thread.

* ``torch.distributed.nn`` takes ``group=dist.group.WORLD`` as default arguments: imported after
  ``init_process_group`` (creating an optimizer is enough), its functions hold the group until exit.
* DistributedDataParallel holds the group in C++ too: see ``AllReduceAverager.close``.
* A future's callbacks outlive a wait for it: see ``once`` in ``compression/hooks/comm_worker.py``.
"""

import atexit
import gc
import hashlib
import importlib
import os
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .store import store_of, timeout_of

# Of each default group and list of ranks: how many groups of them were created.
_created = weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], int]]()

# Groups that this rank needs no more: those that it has not told the others, and those that it has,
# with the keys in the store by which all members tell it.
_given_back: "list[weakref.ref[dist.ProcessGroup]]" = []
_announced = weakref.WeakKeyDictionary[dist.ProcessGroup, list[str]]()

# The most thread blocks of an NCCL kernel, which has an SM for each, and moves 48 GB/s by each: 16
# fill NVLink, 2 a network card. NCCL_MAX_CTAS overrides all.
_CTAS, _P2P_CTAS, NETWORK_CTAS = 16, 8, 2

importlib.import_module("torch.distributed.nn.functional")  # before any group exists: see above


@atexit.register
def _destroy_gloo_group() -> None:  # of a script that never calls destroy_process_group()
    gc.collect()
    # A group without gloo needs no teardown; destroying it here could wait for a dead rank.
    if dist.is_initialized() and "gloo" in dist.get_backend_config():
        dist.destroy_process_group()


def warn_if_alone(stacklevel: int = 4) -> None:
    """Warn at the user's line: a process that torchrun has started has no process group."""
    num_processes = os.environ.get("WORLD_SIZE", "")
    if num_processes.isdecimal() and int(num_processes) > 1 and not dist.is_initialized():
        warnings.warn(
            f"torchrun started {num_processes} processes, but no process group is initialized, so "
            "this process trains alone; call torch.distributed.init_process_group first",
            stacklevel=stacklevel,
        )


def create_group(
    members: Sequence[int],
    process_group: dist.ProcessGroup | None,
    backend: str | None = None,
    *,
    for_p2p: bool = False,
    timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """Return a process group of some ranks of another one, with its backend and timeout.

    All members, and no other rank, must call this with the same ascending list. ``for_p2p``:
    sends and receives alone, so that no collective connects the members of an NCCL group, for which
    it would have another communicator. ``timeout``: another one. A member that died or did not
    connect within it is torch's RuntimeError; gloo waits five times as long for one that had
    published its address.
    """
    parent: Any = process_group or dist.group.WORLD
    _check_split(parent)
    ranks = [dist.get_global_rank(parent, member) for member in members]
    if backend is None:
        # As "cpu:gloo,cuda:gloo" a group would have no default backend for torch where a plugin is
        # loaded, and each would print a warning when it is destroyed.
        config = dist.get_backend_config(parent)
        names = {each.rpartition(":")[2] for each in config.split(",")}
        backend = config if len(names) > 1 else names.pop()
    _announce()
    timeout, is_nccl = timeout or timeout_of(parent), "nccl" in backend
    options: Any = None
    # Messages begin beside kernels that fill the GPU, and leave it most SMs. torch 2.15's nccl2 and
    # nccl-lazy have options of their own.
    if "nccl" in backend.replace(":", ",").split(","):
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        ctas = _P2P_CTAS if for_p2p else _CTAS
        options.config.max_ctas = NETWORK_CTAS if are_on_different_nodes(ranks) else ctas
        options._timeout = timeout  # torch warns of another one
    with _name(ranks):
        group: dist.ProcessGroup = dist.new_group(
            ranks, timeout, backend, pg_options=options, use_local_synchronization=True
        )
    # A member that continues and fails would disconnect those still connecting (gloo), and NCCL
    # needs all ranks in a group's first call, while a gossip round may leave some out.
    if not (for_p2p and is_nccl):
        dist.barrier(group)
    _destroy()
    return group


def device_of(process_group: dist.ProcessGroup | None) -> torch.device:
    """Return a device whose tensors a group sends: a GPU with NCCL. None: the default group."""
    if "nccl" not in dist.get_backend_config(process_group):
        return torch.device("cpu")
    group: Any = process_group or dist.group.WORLD
    return group.bound_device_id or torch.device("cuda", torch.cuda.current_device())


def are_on_different_nodes(ranks: Sequence[int]) -> bool:
    """Return whether no two of several global ranks are on one node, as torchrun numbers them."""
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    nodes = {rank // ranks_per_node for rank in ranks} if ranks_per_node else set()
    return len(nodes) == len(ranks) > 1


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


def give_back(groups: Sequence["weakref.ref[dist.ProcessGroup]"]) -> None:
    """Have gloo groups destroyed where later ones are created, once all members gave them back.

    NCCL's stay, as their members would have to destroy them together.
    """
    _given_back.extend(groups)


def _announce() -> None:
    while _given_back:
        group = _given_back.pop()()
        if group is not None and _exists(group) and "nccl" not in dist.get_backend_config(group):
            members = dist.get_process_group_ranks(group)
            keys = [f"given back/{group.group_name}/{rank}" for rank in members]
            store_of(None).set(keys[dist.get_rank(group)], "")
            _announced[group] = keys


def _destroy() -> None:
    """Destroy the groups that all members have given back, several at a time: each takes 30 ms."""
    if len(_announced) < 8:
        return
    for group, keys in list(_announced.items()):
        if _exists(group) and store_of(None).wait(keys, 0):
            dist.destroy_process_group(group)


def _exists(group: dist.ProcessGroup) -> bool:
    return group in distributed_c10d._world.pg_names


@contextmanager
def _name(ranks: Sequence[int]) -> Iterator[None]:
    """Have torch name the group that is created inside by its ranks and how many they had before.

    torch's own name counts the groups of this process, which may be unequal.
    """
    created = _created.setdefault(dist.group.WORLD, {})
    times = created[tuple(ranks)] = created.get(tuple(ranks), 0) + 1
    name = hashlib.sha1(f"pyparallel {ranks} {times}".encode(), usedforsecurity=False).hexdigest()
    module: Any = distributed_c10d
    before, module._hash_ranks_to_str = module._hash_ranks_to_str, lambda ranks: name
    try:
        yield
    finally:
        module._hash_ranks_to_str = before
