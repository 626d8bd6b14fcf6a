"""``doctor --links``: what pairs of ranks measure, the report, and the file for ``simulate``."""

import argparse
import itertools

import pytest
import torch

from pyparallel.cli import doctor, links
from pyparallel.recommend import pairs
from pyparallel.recommend.pairs import PairLinks
from pyparallel.simulate import Links

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
    return found.hosts, found.rates, found.latencies, found.jitters


def test_all_pairs_measure_the_same_on_all_ranks(ranks):
    first, *others = ranks.run(3, measure)
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
