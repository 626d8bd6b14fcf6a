"""A store's calls end within their deadline; flags: each look returns what was raised, once."""

import datetime
import gc
import multiprocessing
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel.comm.errors import PeerError
from pyparallel.comm.store import DeadlineStore, _Connection, store_of
from pyparallel.gossip import ADPSGD, GossipDataParallel
from pyparallel.gossip.messages import Flags
from pyparallel.gossip.topology import Ring
from tests.workers import observe_ranks


def serve(pipe):
    """Hold a TCPStore until the parent closes the connection."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.poll(None)


def make_stores(folder):
    yield dist.HashStore()
    yield dist.FileStore(str(folder / "store"), 1)
    yield dist.TCPStore("localhost", 0, 1, is_master=True)


def test_a_look_finds_what_was_raised_and_only_once(tmp_path):
    for store in make_stores(tmp_path):
        mine, other = Flags(store, 0, 40), Flags(store, 1, 3)
        assert mine.look() == [], store
        for flag in (39, 0, 30, 31):
            other.raise_for(0, flag)
        assert other.look() == [], store
        assert mine.look() == [0, 30, 31, 39], store
        assert mine.look() == [], store
        mine.raise_for(1, 2)
        assert other.look() == [2], store


def test_a_flag_may_be_raised_again_as_soon_as_it_was_seen(tmp_path):
    for store in make_stores(tmp_path):
        mine, other = Flags(store, 0, 31), Flags(store, 1, 31)
        for _ in range(5):
            for flag in range(31):
                other.raise_for(0, flag)
            assert mine.look() == list(range(31)), store
        assert mine.look() == [], store


def test_concurrent_raises_lose_nothing(tmp_path):
    for store in make_stores(tmp_path):
        mine = Flags(store, 0, 64)
        threads = [
            threading.Thread(target=Flags(store, 1 + flag, 1).raise_for, args=(0, flag))
            for flag in range(64)
        ]
        for thread in threads:
            thread.start()
        found = []
        while any(thread.is_alive() for thread in threads):
            found += mine.look()
        assert sorted(found + mine.look()) == list(range(64)), store


def test_a_flag_that_no_rank_raises_is_refused(tmp_path):
    for store in make_stores(tmp_path):
        for rank, (num_flags, word, amount) in enumerate(
            [
                (3, 0, 1 << 2 * 3),
                (3, 0, 1 << 60),
                (40, 1, 1 << 2 * 9),
                (40, 1, -1),
                (31, 0, 1 << 62),
            ]
        ):
            flags = Flags(store, rank, num_flags)
            store.add(f"flags/{rank}/{word}", amount)
            with pytest.raises(
                PeerError, match=f"rank {rank}: only ranks of the process group may"
            ):
                flags.look()


def deadline_store(store, seconds=30.0, rank=3):
    return DeadlineStore(_Connection(store), "", seconds, rank)


def test_calls_are_those_of_the_store(tmp_path):
    for inner in make_stores(tmp_path):
        for store in (deadline_store(inner), deadline_store(dist.PrefixStore("part", inner))):
            assert store.get("text") is None
            assert not store.wait(["text"], 0.01)
            store.set("text", "")
            assert store.get("text") == ""
            store.set("text", "näher")
            assert store.get("text") == "näher"
            assert store.wait(["text"], 0.01)
            assert not store.wait(["text", "other"], 0.01)
            threading.Timer(0.1, store.set, ("other", "1")).start()
            assert store.wait(["text", "other"], 30)
            assert [store.add("count", 2), store.add("count", -1)] == [2, 1]
            assert [store.setdefault("first", each) for each in ("é", "b")] == ["é", "é"]


def test_a_connection_ends_with_its_last_store():
    before = set(threading.enumerate())
    store = deadline_store(dist.HashStore())
    store.set("text", "1")
    (thread,) = [each for each in threading.enumerate() if each not in before]
    del store
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


class DeadStore:
    """A store whose process has died."""

    def add(self, key, amount, /):
        raise RuntimeError("Connection reset by peer\nand more")


def test_a_dead_store_is_named():
    flags = Flags(deadline_store(DeadStore()), 3, 1)
    for call in (flags.look, lambda: flags.raise_for(0, 0)):
        with pytest.raises(PeerError, match=r"rank 3: .* failed \(Connection reset by peer\)"):
            call()


@pytest.fixture
def server():
    """A TCPStore in a process of its own; yields the process id and the port."""
    context = multiprocessing.get_context("forkserver")  # in which torch is imported
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    yield process.pid, ours.recv()
    process.kill()
    process.join()


def stop(pid):
    """Stop a process, and wait until all of its threads are."""
    os.kill(pid, signal.SIGSTOP)
    while not all(" T " in path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")):
        time.sleep(0.001)


def test_calls_to_a_stopped_store_end_and_do_not_lock_it(server):
    pid, port = server
    inner = dist.TCPStore("127.0.0.1", port, is_master=False)
    calls = [
        lambda store: store.get("text"),
        lambda store: store.add("count", 1),
        lambda store: store.wait(["text"], 0.1),
        lambda store: store.set("text", "1"),
    ]
    for call in calls:
        store, fresh = deadline_store(inner, 0.2), deadline_store(inner, 0.2)
        store.add("count", 1)
        stop(pid)
        answered = calls[0] if call is calls[-1] else call  # set() has no answer to wait for
        for each, its_call in [(store, answered), (fresh, call), (store, call)]:
            with pytest.raises(PeerError, match=rf"^rank 3: .* 0.2 s: .* 127.0.0.1:{port} died"):
                its_call(each)  # fresh connects while the server stands
        os.kill(pid, signal.SIGCONT)
        assert inner.add("users", 1)  # on the connection that torch uses


def train_until_the_store_stops(rank, port, pid):
    timeout = datetime.timedelta(seconds=2)
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timeout)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = GossipDataParallel(model, optimizer, ADPSGD(Ring(3)))
    for step in range(10**9):
        optimizer.zero_grad()
        trainer(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        if step == 10 and rank == 0:
            os.kill(pid, signal.SIGSTOP)


@pytest.mark.slow
def test_all_ranks_end_when_the_store_stops(server):
    pid, port = server
    outcomes = observe_ranks(3, train_until_the_store_stops, port, pid, time_limit=150)
    for rank, outcome in enumerate(outcomes):
        assert re.match(
            rf"PeerError: rank {rank}: the process group's store .* 2 s: .* 127.0.0.1:{port} died",
            outcome.error,
        ), outcome.log


def exchange_flags(rank, num_rounds):
    """Raise a flag for each other rank, and wait for theirs before the next round."""
    group = dist.new_group()
    num_ranks = dist.get_world_size()
    flags = Flags(store_of(group), rank, num_ranks)
    others = [peer for peer in range(num_ranks) if peer != rank]
    seen = []
    for _ in range(num_rounds):
        for peer in others:
            flags.raise_for(peer, rank)
        found = []
        while len(found) < len(others):
            found += flags.look()
        seen.append(sorted(found) == others)
        dist.barrier()
    return all(seen) and flags.look() == []


def test_flags_cross_between_processes(ranks):
    assert ranks.run(3, exchange_flags, 50) == [True] * 3
