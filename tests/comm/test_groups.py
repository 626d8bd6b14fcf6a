"""Groups within groups: every part has its own ranks, in any order of creation."""

import os
import resource
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pyparallel import GossipDataParallel
from pyparallel.comm import Run, process_groups, store_of
from pyparallel.comm.process_groups import create_group, device_of
from pyparallel.gossip import SGP
from pyparallel.gossip.algorithms.node_averager import counterparts_of, node_of
from pyparallel.gossip.topology import Ring
from pyparallel.pipeline.messages import P2PGroups
from tests.cases import nightly
from tests.comm import trainers
from tests.gossip.loops import batches, build_model, train
from tests.workers import observe_ranks


def test_consecutive_ranks_form_a_node():
    assert [list(node_of(rank, 3)) for rank in (0, 2, 3)] == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
    assert [list(counterparts_of(rank, 3, 6)) for rank in (0, 4)] == [[0, 3], [1, 4]]


def new_run(members, parent):
    return Run(parent).within(members)


def sum_of_ranks(group):
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total, group=group)
    return int(total)


def make_parts(rank, subgroup):
    """Return sums over nodes and counterparts, then over the default group."""
    parent = dist.new_group(subgroup) if subgroup else None
    sums = None
    if not subgroup or rank in subgroup:
        place, size = dist.get_rank(parent), dist.get_world_size(parent)
        node = new_run(node_of(place, 2), parent)
        others = new_run(counterparts_of(place, 2, size), parent)
        again = new_run(node_of(place, 2), parent)
        sums = [sum_of_ranks(run.group) for run in (node, others, again)]
    return sums, sum_of_ranks(dist.new_group(range(dist.get_world_size())))


def test_every_node_has_its_own_group(ranks):
    # Regression: LSGD's code built all groups of a rank from its own node's index.
    outcomes = ranks.run(4, make_parts, None)
    assert [sums for sums, _ in outcomes] == [[1, 2, 1], [1, 4, 1], [5, 2, 5], [5, 4, 5]]
    assert {total for _, total in outcomes} == {6}


def test_a_subgroup_is_divided_without_the_others(ranks):
    outcomes = ranks.run(5, make_parts, [0, 1, 3, 4])
    assert [sums for sums, _ in outcomes] == [[1, 3, 1], [1, 5, 1], None, [7, 3, 7], [7, 5, 7]]
    assert {total for _, total in outcomes} == {10}


def trains_in_overlapping_groups(rank):
    """Ranks 0 and 1, and 1 and 2, each with trainers, of which one is closed and made again."""
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    numbers, trainers = [], []
    for place, pair in enumerate([*pairs, pairs[0], pairs[1], pairs[0]]):
        if dist.get_rank(pair) < 0:
            continue
        if rank == place == 0:  # as a user's own, in which the others take no part
            dist.new_group([0], use_local_synchronization=True)
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        wrapped = GossipDataParallel(model, optimizer, SGP(Ring(2), overlap=1), process_group=pair)
        train(model, optimizer, list(batches(rank, 2)), forward=wrapped)
        assert wrapped.process_group is pair
        numbers.append(wrapped._run.trainer)
        if place == 2:
            wrapped.close()
        trainers.append(wrapped)
    return numbers, sum_of_ranks(new_run(range(3), None).group)


def test_ranks_in_unequal_numbers_of_trainers_can_make_another(ranks):
    outcomes = ranks.run(3, trains_in_overlapping_groups, time_limit=40)
    numbers = [[number - outcomes[0][0][0] for number in each] for each, _ in outcomes]
    assert numbers == [[0, 2, 3], [0, 1, 2, 2, 3], [1, 2]]
    assert [total for _, total in outcomes] == [3, 3, 3]


def headers_group(rank):
    groups = P2PGroups.connect(Run.open(None), torch.device("cpu"), is_ring=False)
    return groups.headers is None, groups.supports_inline


def test_messages_of_a_gloo_trainer_carry_their_headers(ranks):
    """A group is of gloo for every device, which torch names otherwise than gloo."""
    assert ranks.run(2, headers_group) == [(True, True)] * 2


def connect_to_a_dead_rank(rank):
    if rank == 2:
        os._exit(3)
    new_run([0, 2] if rank == 0 else [1, 2], None)


@pytest.mark.slow  # waits for a timeout
def test_a_member_that_dies_before_connecting_is_an_error_on_the_others():
    outcomes = observe_ranks(3, connect_to_a_dead_rank, time_limit=40, group_timeout=5)
    for rank, outcome in enumerate(outcomes[:2]):
        assert outcome.error.startswith(
            f"PeerError: rank {rank}: a process group of ranks [{rank}, 2] could not be created: "
            "rank 2 d"  # died, or did not respond
        )


def wait_for_a_silent_rank(rank):
    group = create_group([0, 1], None)
    store = dist.group.WORLD.get_group_store()
    if rank == 0:
        with pytest.raises(RuntimeError, match="imed out"):
            dist.barrier(group=group)
        store.set("raised", "")
    while not store.check(["raised"]):
        time.sleep(0.05)


def test_a_subgroup_has_the_timeout_of_its_parent(ranks):
    outcomes = ranks.observe(2, wait_for_a_silent_rank, group_timeout=1, time_limit=30)
    assert [outcome.error for outcome in outcomes] == [None, None]


@pytest.fixture
def fake_nccl(monkeypatch):
    """What creates groups, as with NCCL and four ranks: each group is its arguments."""

    def options(**given):
        return SimpleNamespace(config=SimpleNamespace(), **given)

    backend = SimpleNamespace(supports_splitting=True)
    world = SimpleNamespace(
        bound_device_id=torch.device("cuda", 0), _get_backend=lambda device: backend
    )
    fake = SimpleNamespace(
        group=SimpleNamespace(WORLD=world),
        get_world_size=lambda group=None: 2 if group == "pair" else 4,
        get_global_rank=lambda group, rank: rank,
        get_backend_config=lambda group: "nccl",
        new_group=lambda ranks, timeout, backend, pg_options, **_: (backend, pg_options),
        barrier=lambda group: None,
        ProcessGroupNCCL=SimpleNamespace(Options=options),
    )
    monkeypatch.setattr(process_groups, "dist", fake)
    monkeypatch.setattr(process_groups, "timeout_of", lambda group: "its timeout")
    monkeypatch.setattr(process_groups, "_name", lambda ranks: nullcontext())
    return backend


def test_some_ranks_alone_cannot_split_the_communicator_of_all(fake_nccl):
    """As after init_process_group(device_id=...) with NCCL, where the others would have to call."""
    message = "process_group must have all ranks if .* got one of 2 of 4 ranks: leave out device_id"
    with pytest.raises(ValueError, match=message):
        create_group([0, 1], "pair")
    assert create_group([0, 1], None)  # the others make their own in the same call
    fake_nccl.supports_splitting = False
    assert create_group([0, 1], "pair")


def test_groups_of_nccl_have_priority_and_few_thread_blocks(fake_nccl, monkeypatch):
    """On a network, where no two ranks are on one node, even fewer."""
    for for_p2p, members, max_ctas in (
        *((False, [0, 1, 2, 3], 16), (True, [0, 1, 2, 3], 8), (True, [0, 1], 8)),
        *((False, [1, 3], 2), (True, [1, 2], 2)),
    ):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        fake_nccl.supports_splitting = False
        backend, options = create_group(members, None, for_p2p=for_p2p)
        assert (backend, options.is_high_priority_stream) == ("nccl", True)
        assert (options.config.max_ctas, options._timeout) == (max_ctas, "its timeout")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert create_group([1, 3], None)[1].config.max_ctas == 16
    for other in ("gloo", "cpu:gloo,cuda:nccl2", "nccl-lazy"):
        assert create_group([0, 1], None, other, for_p2p=True) == (other, None)


def test_the_device_of_a_group_is_that_of_its_backend(monkeypatch):
    group = SimpleNamespace(bound_device_id=None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for config, bound, wanted in (
        ("cpu:gloo,cuda:gloo", None, "cpu"),
        ("cuda:nccl", None, "cuda:3"),
        ("cuda:nccl", torch.device("cuda", 1), "cuda:1"),
    ):
        monkeypatch.setattr(dist, "get_backend_config", lambda _, config=config: config)
        group.bound_device_id = bound
        assert device_of(group) == torch.device(wanted)


def make_hook():
    return trainers.hook(process_group=PARENTS[-1])[1:]


PARENTS = []


def make_many(rank, make, count):
    """Return open descriptors and threads after each trainer, closed or dropped in turns."""
    PARENTS.append(dist.group.WORLD)  # each DDP would hold another
    found = []
    for number in range(count):
        *trainer, step = make()
        for _ in range(2):
            step()
        if trainer and number % 2:
            trainer[0].close()
        del trainer, step
        found.append([len(os.listdir(f"/proc/self/{each}")) for each in ("fd", "task")])
    PARENTS.clear()
    return found


KINDS = [trainers.gossip, trainers.pipeline, trainers.subnets, make_hook]


@pytest.mark.parametrize(("makes", "count"), [([trainers.gossip], 40), nightly(KINDS, 100)])
def test_trainers_give_their_groups_back(ranks, makes, count):
    """Those that were closed or dropped are destroyed several at a time."""
    for make in makes:
        for found in ranks.run(2, make_many, make, count, time_limit=150 + count):
            descriptors, threads = (max(each) for each in zip(*found, strict=True))
            groups = 20  # are there at most, each with five descriptors and three threads
            assert descriptors < found[0][0] + 5 * groups, make.__name__
            assert threads < found[0][1] + 3 * groups, make.__name__


def run_out_of_descriptors(rank):
    dist.barrier()
    store_of(None).get("connect")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft if rank else 3, hard))
    try:
        Run.open(None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_a_rank_that_may_open_no_file_says_so(ranks):
    here, there = ranks.observe(2, run_out_of_descriptors, group_timeout=2)
    what = "a process group of ranks [0, 1] could not be created"
    assert here.error == f"PeerError: rank 0: {what} on this rank: Too many open files"
    failed = "rank 0 failed: Too many open files"
    assert there.error.startswith(f"PeerError: rank 1: {what}: {failed} (")


def give_groups_back_one_after_the_other(rank):
    """Return how many groups this rank has while one rank, and after both, gave nine back."""
    runs, found = [Run.open(None) for _ in range(9)], []
    for turn in (0, 1):
        if rank == turn:
            for run in runs:
                run.close()
        Run.open(None)
        found.append(len(distributed_c10d._world.pg_names))
        dist.barrier()
    return found


def test_a_group_is_destroyed_once_all_its_ranks_have_given_it_back(ranks):
    before = 1 + 9 + 1  # the default group, the nine, and the one that was made after them
    assert ranks.run(2, give_groups_back_one_after_the_other) == [[before, before + 1 - 9 - 1]] * 2
