"""SMs that matrix products leave to NCCL's kernels, which hold one a block until they are sent."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...comm.process_groups import NETWORK_CTAS, are_on_different_nodes

_held: list[int] = []  # of each message in flight: how many SMs
_before: list[int | None] = []  # what was set before the first


def leave_sms(count: int, owner: object) -> Callable[[], object]:
    """Have products leave SMs free until the result is called, or the owner is freed.

    A product of one block an SM that misses some takes twice as long: its last blocks run alone.
    Only what is enqueued from now on does. Nothing without torch's experimental carve-out.
    """
    set_carveout: Any = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if set_carveout is None:
        return lambda: None
    if not _held:
        _before[:] = [torch._C._get_sm_carveout_experimental()]
    _held.append(count)
    set_carveout(max(*_held, _before[0] or 0))
    return weakref.finalize(owner, _release, count, set_carveout)


def _release(count: int, set_carveout: Callable[[int | None], None]) -> None:
    _held.remove(count)
    set_carveout(max(*_held, _before[0] or 0) if _held else _before[0])


def num_network_sms(process_group: dist.ProcessGroup | None) -> int:
    """Return how many SMs a group's NCCL kernels hold while they wait for a network; else 0."""
    if not dist.is_initialized() or "nccl" not in dist.get_backend_config(process_group):
        return 0
    ranks = dist.get_process_group_ranks(process_group)
    return NETWORK_CTAS if are_on_different_nodes(ranks) else 0
