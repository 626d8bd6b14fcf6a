"""``python -m pyparallel topology``: properties and a picture of any topology."""

import sys

import pytest

from pyparallel.__main__ import main
from pyparallel.cli.topology import find_kinds
from pyparallel.gossip import OSGP, SGP, stability_limit
from pyparallel.gossip.topology import Ring

NEEDS_EVEN, NEEDS_POWER_OF_TWO = "BipartiteExponential", "Hypercube"


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Run the command in this process."""
    monkeypatch.chdir(tmp_path)

    def run_here(*arguments):
        monkeypatch.setattr(sys, "argv", ["pyparallel", "topology", *arguments])
        main()

    return run_here


def test_all_topologies_that_need_only_ranks_are_found():
    kinds = find_kinds()
    assert {"Ring", "BaseGraph", "Star", "HierarchicalTopology", NEEDS_EVEN} <= set(kinds)
    assert not {"Topology", "Circulant", "Matching", "FromGraph", "TimeVarying"} & set(kinds)


def test_properties_and_picture(call, capsys, tmp_path):
    call("Star", "--ranks", "16")
    printed = capsys.readouterr().out
    for words in ("period", "degree", "spectral gap", "sent per step", "ring all-reduce"):
        assert words in printed, words
    assert (tmp_path / "Star-16.png").stat().st_size > 10_000


@pytest.mark.parametrize("num_ranks", [1, pytest.param(10_000, marks=pytest.mark.slow)])
def test_any_number_of_ranks(call, capsys, num_ranks):
    call("OnePeerExponential", "--ranks", str(num_ranks))
    printed = capsys.readouterr().out
    assert "spectral gap" in printed
    assert num_ranks == 1 or "14" in printed  # the period


def rows_of(printed):
    table = printed.split("\n\n")[1].splitlines()
    return {row.split()[0]: row.split()[1:] for row in table[1:]}


def test_all_topologies_in_one_table(call, capsys, tmp_path):
    call()
    printed = capsys.readouterr().out
    assert printed.startswith("8 ranks, a model of 100.0 MB\n\n")
    rows = rows_of(printed)
    # Degree, period, rounds to consensus, spectral gap, MB per step, of all-reduce.
    assert rows["OnePeerExponential"] == ["1", "3", "3", "1", "100.0", "0.57"]
    assert rows["Ring"] == ["2", "1", "93", "0.195", "200.0", "1.14"]
    assert rows["Complete"] == ["7", "1", "1", "1", "700.0", "4.00"]
    assert set(rows) == find_kinds().keys() - {"HierarchicalTopology"}
    sent = [float(row[-2]) for row in rows.values()]
    assert sent == sorted(sent)
    assert list(tmp_path.iterdir()) == []  # no picture
    call("--ranks", "6", "--parameters", "1e6")
    printed = capsys.readouterr().out
    assert "num_ranks must be a power of two, got 6; the nearest are 4 and 8" in printed
    assert NEEDS_POWER_OF_TWO not in rows_of(printed)
    assert rows_of(printed)["Ring"][-2] == "8.0"


def test_bad_arguments_are_refused_in_one_sentence(call, capsys):
    for arguments, sentence in [
        (["Hypercube", "--ranks", "6"], "power of two, got 6; the nearest are 4 and 8"),
        (["Ring", "--ranks", "0"], "num_ranks must be a positive integer, got 0"),
        (["Ring", "--ranks", "4", "--peers", "2"], "Ring takes no peers"),
        (["Circle", "--ranks", "4"], "invalid choice: 'Circle'"),
        (["--ranks", "0"], "--ranks must be from 1 to 256 without a NAME, got 0"),
        (["--ranks", "1000"], "--ranks must be from 1 to 256 without a NAME, got 1000"),
        (["--peers", "2"], "--peers must come with a NAME, got 2 alone"),
        (["--out", "x.png"], "--out must come with a NAME, got x.png alone"),
    ]:
        with pytest.raises(SystemExit) as ended:
            call(*arguments)
        assert ended.value.code not in (None, 0), arguments
        assert sentence in f"{ended.value.code}{capsys.readouterr().err}", arguments


def limits_of(printed):
    lines = [line.strip() for line in printed.splitlines() if line.startswith("  ")]
    return {line[:20].strip(): line[20:].split() for line in lines}


def test_stable_rates_are_those_of_the_function(call, capsys):
    graph = Ring(8)
    call("Ring", "--ranks", "8", "--momentum", "0.5")
    printed = capsys.readouterr().out
    assert "stable lr * L, momentum 0 and 0.5\n" in printed
    limits = limits_of(printed)
    assert len(limits) == 7
    for name, algorithm in [
        ("SGP", SGP(graph)),
        ("SGP, overlap=1", SGP(graph, overlap=1)),
        ("OSGP, delay=4", OSGP(graph, 4)),
    ]:
        both = [stability_limit(algorithm, momentum=each) for each in (0, 0.5)]
        assert limits[name] == [f"{both[0]:.2f},", f"{both[1]:.2f}"], name


def test_a_lazier_mix_has_larger_stable_rates(call, capsys):
    call("Ring", "--ranks", "8", "--lazy", "0.5")
    printed = capsys.readouterr().out
    assert "Lazy(Ring(8), gamma=0.5)" in printed
    assert limits_of(printed)["SGP, overlap=1"][0] == "1.33,"  # 1 + lambda_min, 0.67 without


def test_stable_rates_of_many_ranks_are_not_computed(call, capsys):
    call("Torus", "--ranks", "36")
    assert "not computed for more than 32 ranks" in capsys.readouterr().out
    for wrong in ("1", "-0.1"):
        with pytest.raises(SystemExit, match=r"topology: momentum must be in \[0, 1\), got"):
            call("Ring", "--momentum", wrong)
    with pytest.raises(SystemExit, match=r"topology: gamma must be in \(0, 1\], got 2.0"):
        call("Ring", "--lazy", "2")
