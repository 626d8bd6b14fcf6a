"""All ranks come together, or learn that they cannot."""

import os
import signal

import torch.distributed as dist

from pyparallel.comm import PeerError, barrier_of
from tests.workers import observe_ranks, run_ranks


def meet_after_setting_a_key(rank):
    store, meet = dist.group.WORLD.get_group_store(), barrier_of(None)
    store.set(f"here/{rank}", "")
    meet()
    return store.check([f"here/{other}" for other in range(dist.get_world_size())])


def test_nobody_leaves_before_all_have_come():
    assert run_ranks(3, meet_after_setting_a_key) == [True] * 3


def meet_the_dead(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        barrier_of(None)()
    except PeerError as error:
        return str(error)
    return None


def test_who_waits_for_a_dead_rank_is_told():
    first, _, third = observe_ranks(3, meet_the_dead, group_timeout=10)
    for rank, outcome in ((0, first), (2, third)):
        assert outcome.value.startswith(
            f"rank {rank}: not all ranks reached the barrier: one died or"
        )
