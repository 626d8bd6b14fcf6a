"""Flags: each look returns what was raised since the last, once, with every kind of store."""

import threading

import pytest
import torch.distributed as dist

from pyparallel.comm import Flags, PeerError


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
            store.add(f"pyparallel/flags/{rank}/{word}", amount)
            with pytest.raises(
                PeerError, match=f"rank {rank}: only ranks of the process group may"
            ):
                flags.look()


class DeadStore:
    """A store whose process has died."""

    def add(self, key, amount, /):
        raise RuntimeError("Connection reset by peer\nand more")


def test_a_dead_store_is_named():
    flags = Flags(DeadStore(), 3, 1)
    for call in (flags.look, lambda: flags.raise_for(0, 0)):
        with pytest.raises(PeerError, match=r"rank 3: .* store .* died \(Connection reset by peer"):
            call()


def exchange_flags(rank, num_rounds):
    """Raise a flag for each other rank, and wait for theirs before the next round."""
    group = dist.new_group()
    num_ranks = dist.get_world_size()
    flags = Flags(group.get_group_store(), rank, num_ranks)
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
