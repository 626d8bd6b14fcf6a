"""A barrier waits for all ranks, or raises an error."""

import os
import signal

import torch.distributed as dist

from pyparallel.comm.errors import PeerError
from pyparallel.comm.run import Run
from tests.workers import observe_ranks


def barrier_after_setting_a_key(rank):
    store, barrier = dist.group.WORLD.get_group_store(), Run().barrier
    store.set(f"here/{rank}", "")
    barrier()
    return store.check([f"here/{other}" for other in range(dist.get_world_size())])


def test_no_rank_leaves_before_all_have_entered(ranks):
    assert ranks.run(3, barrier_after_setting_a_key) == [True] * 3


def wait_for_a_dead_rank(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        Run().barrier()
    except PeerError as error:
        return str(error)
    return None


def test_waiting_for_a_dead_rank_is_an_error():
    first, _, third = observe_ranks(3, wait_for_a_dead_rank, group_timeout=10)
    for rank, outcome in ((0, first), (2, third)):
        assert outcome.value.startswith(
            f"rank {rank}: not all ranks reached the barrier: rank 1 died, or ended"
        )
