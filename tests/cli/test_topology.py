"""``python -m pyparallel topology``: figures and a picture for any topology, at any size."""

import subprocess
import sys

import pytest

from pyparallel.__main__ import main
from pyparallel.cli.topology import find_kinds

NEEDS_EVEN, NEEDS_POWER_OF_TWO = "BipartiteExponential", "Hypercube"


def run(*arguments, folder):
    """In a process of its own, as the shell does."""
    command = [sys.executable, "-m", "pyparallel", "topology", *arguments]
    options = {"capture_output": True, "text": True, "timeout": 120, "cwd": folder}
    return subprocess.run(command, check=False, **options)


@pytest.fixture
def call(monkeypatch, tmp_path):
    """The same in this process, which need not start one."""
    monkeypatch.chdir(tmp_path)

    def run_here(*arguments):
        monkeypatch.setattr(sys, "argv", ["pyparallel", "topology", *arguments])
        main()

    return run_here


def test_it_knows_every_topology_that_needs_ranks_alone():
    kinds = find_kinds()
    assert {"Ring", "BaseGraph", "Star", "HierarchicalTopology", NEEDS_EVEN} <= set(kinds)
    assert not {"Topology", "Circulant", "Matching", "FromGraph", "TimeVarying"} & set(kinds)


@pytest.mark.parametrize("name", ["Star", "BaseGraph", NEEDS_POWER_OF_TWO])
def test_figures_and_picture(call, capsys, tmp_path, name):
    call(name, "--ranks", "16")
    printed = capsys.readouterr().out
    for words in ("period", "degree", "spectral gap", "sent per step", "ring all-reduce"):
        assert words in printed
    assert (tmp_path / f"{name}-16.png").stat().st_size > 10_000


def test_ten_thousand_ranks(call, capsys):
    call("OnePeerExponential", "--ranks", "10000")
    assert "14" in capsys.readouterr().out


def test_one_rank(tmp_path):
    assert run("Ring", "--ranks", "1", folder=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["Hypercube", "--ranks", "6"], "power of two, got 6; the nearest are 4 and 8"),
        (["Ring", "--ranks", "0"], "num_ranks must be a positive integer, got 0"),
        (["Ring", "--ranks", "4", "--peers", "2"], "Ring takes no peers"),
        (["Circle", "--ranks", "4"], "invalid choice: 'Circle'"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(call, capsys, arguments, sentence):
    with pytest.raises(SystemExit) as ended:
        call(*arguments)
    assert ended.value.code not in (None, 0)
    assert sentence in f"{ended.value.code}{capsys.readouterr().err}"


def test_a_refusal_is_all_that_the_shell_shows(tmp_path):
    done = run("Hypercube", "--ranks", "6", folder=tmp_path)
    assert done.returncode != 0
    assert "power of two, got 6; the nearest are 4 and 8" in done.stderr
    assert "Traceback" not in done.stderr
