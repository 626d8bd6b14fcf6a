"""``doctor --links``: what pairs of ranks measure, the report, and the file for ``simulate``."""

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

from benchmarks.harness.link import limited_links
from pyparallel.cli import doctor, links
from pyparallel.comm.process_groups import create_group
from pyparallel.planning.recommend import pairs
from pyparallel.planning.recommend.pairs import PairLinks
from pyparallel.planning.simulate import Links
from tests.workers import observe_ranks

MBIT = 1e6 / 8


def make(hosts, *, within=1000.0, between=100.0, slow=()):
    """Return links with rates in Mbit/s, and those of slow pairs a tenth."""
    size = len(hosts)
    rates, latencies = torch.zeros(2, size, size, dtype=torch.float64)
    for a, b in itertools.permutations(range(size), 2):
        is_within = hosts[a] == hosts[b]
        rates[a, b] = MBIT * (within if is_within else between)
        latencies[a, b] = 1e-4 if is_within else 5e-3
        if (min(a, b), max(a, b)) in slow:
            rates[a, b] /= 10
    return PairLinks(tuple(hosts), rates, latencies, latencies / 10)


def measure(rank):
    found = pairs.measure_pairs(torch.device("cpu"))
    with mock.patch.object(pairs, "create_group", refusing):
        second = pairs.measure_pairs(torch.device("cpu"))
    return (found.hosts, found.rates, found.latencies, found.jitters), second


def refusing(members, *arguments, **options):
    """Create a group, but not that of ranks 1 and 2."""
    if members == [1, 2]:
        raise RuntimeError("[x/gloo/transport/tcp/pair.h:311] Connect timeout [10.0.0.1]:55691")
    return create_group(members, *arguments, **options)


def test_all_pairs_measure_the_same_on_all_ranks(ranks):
    outcomes = ranks.run(3, measure)
    first, *others = [found for found, _ in outcomes]
    for other in others:
        assert other[0] == first[0]
        torch.testing.assert_close(other[1:], first[1:], rtol=0, atol=0)
    hosts, rates, latencies, jitters = first
    assert hosts == (hosts[0],) * 3
    apart = ~torch.eye(3, dtype=torch.bool)
    for each in (rates, latencies, jitters):
        assert (each[apart] > 0).all()
        assert (each.diagonal() == 0).all()
        torch.testing.assert_close(each, each.T, rtol=0, atol=0)
    for _, found in outcomes:  # of which one pair cannot connect
        assert found.down == {(1, 2): "gloo: Connect timeout"}
        assert list(found.pairs()) == [(0, 1), (0, 2)]
        torch.testing.assert_close(found.rates > 0, apart & (found.rates > 0).T)
        assert found.rates[1, 2] == 0 < min(found.rates[0, 1], found.rates[0, 2])


def measure_or_stop(rank):
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    begin = time.monotonic()
    found = pairs.measure_pairs(torch.device("cpu"), seconds=5.0)
    return found.down, found.rates[0, 1].item(), time.monotonic() - begin


@pytest.mark.slow  # waits until the stopped rank is killed
def test_a_rank_that_is_stopped_is_named_and_the_others_measure():
    outcomes = observe_ranks(3, measure_or_stop, time_limit=30)
    for outcome in outcomes[:2]:
        down, rate, seconds = outcome.value
        assert down == dict.fromkeys([(0, 2), (1, 2)], "rank 2 did not respond within 5 s")
        assert rate > 0
        assert seconds < 25


def report_from(place, rank, folder):
    """Run ``doctor --links`` as a rank, and write what it prints."""
    place.enter(rank)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3"}
    os.environ |= {"MASTER_ADDR": place.host, "MASTER_PORT": str(place.port)}
    text = doctor.report(argparse.Namespace(links=True, out=folder / "links.toml"))
    (folder / f"rank-{rank}").write_text(text)


@pytest.mark.slow  # gloo tries to connect for 20 s
def test_a_pair_whose_link_is_down_is_named_and_the_others_measure(tmp_path):
    with ExitStack() as stack:
        try:
            place = stack.enter_context(limited_links(3, 1000))
        except RuntimeError as error:
            pytest.skip(str(error))
        for namespace, peer in zip(place.namespaces[1:], ("10.0.0.3", "10.0.0.2"), strict=True):
            # Ranks 1 and 2 send each other's packets to a card that nobody has.
            command = f"ip neigh replace {peer} lladdr 02:00:00:00:00:99 dev eth0 nud permanent"
            subprocess.run(["nsenter", f"--net={namespace}", *command.split()], check=True)
        processes = [
            multiprocessing.get_context("spawn").Process(
                target=report_from, args=(place, rank, tmp_path)
            )
            for rank in range(3)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
            assert process.exitcode == 0
    assert (tmp_path / "rank-1").read_text() == (tmp_path / "rank-2").read_text() == ""
    text = (tmp_path / "rank-0").read_text()
    host = socket.gethostname()
    assert f"\n  1 and 2 ({host}, {host}): gloo: Connect timeout\nopen all TCP ports" in text
    assert re.search(r"\nrank 1 +[\d,]+ +down\nrank 2 +[\d,]+ +down *\n", text)
    assert "links.toml is not written: simulate needs the links of all pairs" in text
    assert not (tmp_path / "links.toml").exists()


@pytest.mark.parametrize(
    ("found", "groups"),
    [
        (make("aabb"), [(1, 1000.0), (2, 100.0)]),
        (make("ab", between=50.0), [(1, 50.0)]),
        (make("aaa"), [(1, 1000.0)]),
        (make("aab"), [(1, 100.0)]),  # hosts with unequal numbers of ranks are no groups
        (make("abab"), [(1, 100.0)]),  # nor are ranks that are not side by side
    ],
)
def test_simulate_reads_the_file(tmp_path, found, groups):
    path = tmp_path / "links.toml"
    path.write_text(links.to_toml(found))
    read = Links.read(path, found.num_ranks)
    assert [each.ranks for each in read.uplinks] == [ranks for ranks, _ in groups]
    assert [each.rate for each in read.uplinks] == pytest.approx([MBIT * r for _, r in groups])
    assert read.slow_edges == {}


def test_slow_pairs_are_named_and_written(tmp_path):
    found = make("aabb", slow=[(0, 3)])
    text = "\n".join(links.describe(found, "gloo"))
    assert "links of 4 ranks on 2 machines, gloo" in text
    assert "0 and 3 (a, b): 10 Mbit/s" in text
    path = tmp_path / "links.toml"
    path.write_text(links.to_toml(found))
    slow = Links.read(path, 4).slow_edges
    assert set(slow) == {(0, 3), (3, 0)}
    assert slow[0, 3] == pytest.approx((MBIT * 10, 5e-3))


def test_pairs_without_a_link_are_named_first():
    hosts = "a" * 5 + "b" * 5
    down = {(a, 9): "rank 9 did not respond within 20 s" for a in range(9)}
    text = "\n".join(links.describe(dataclasses.replace(make(hosts), down=down), "gloo"))
    assert "pairs of ranks without a link\n  0 and 9 (a, b): rank 9 did not respond" in text
    assert "  7 and 9 (b, b): rank 9 did not respond within 20 s\n  and 1 more\nopen all" in text
    assert "no pair is slower than" in text


def test_many_ranks_are_a_table_of_medians():
    text = "\n".join(links.describe(make("a" * 6 + "b" * 6), "nccl"))
    assert "between machines" in text
    assert "rank 11" not in text
    assert "no pair is slower than 70% of the median" in text
    assert "NCCL_SOCKET_IFNAME" in text


def test_what_is_set_is_said(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(links.socket, "gethostbyname", lambda name: "127.0.0.1")
    text = "\n".join(links.describe(make("ab"), "gloo"))
    assert "this machine's name is 127.0.0.1 (lo), which gloo takes" in text
    assert "other machines cannot reach it: set GLOO_SOCKET_IFNAME" in text
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert "GLOO_SOCKET_IFNAME: eth7" in "\n".join(links.describe(make("ab"), "gloo"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"links": True, "out": None}, "doctor: --links needs the ranks of a run, got one process"),
        ({"links": False, "out": "links.toml"}, "doctor: --out needs --links, got links.toml"),
    ],
)
def test_commands_that_are_refused(options, text, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match=text):
        doctor.report(argparse.Namespace(**options))


def test_too_many_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(pairs.dist, "get_world_size", lambda: 65)
    monkeypatch.setattr(pairs.dist, "get_rank", lambda: 0)
    with pytest.raises(ValueError, match=r"ranks must be 2 to 64 .* got 65; start one"):
        pairs.measure_pairs(torch.device("cpu"))
