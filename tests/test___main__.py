"""``python -m pyparallel``: its commands, and the help of each."""

import importlib
import shlex
import sys

import pytest

from pyparallel import cli
from pyparallel.__main__ import main


@pytest.fixture
def call(monkeypatch, capsys):
    """Run the command line in this process; return its exit status and what it printed."""

    def run_here(*arguments):
        monkeypatch.setattr(sys, "argv", ["pyparallel", *arguments])
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = ended.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run_here


def test_alone_it_prints_the_help_with_its_commands(call):
    status, alone, _ = call()
    assert (status, alone) == call("-h")[:2]
    assert status == 0
    assert "example: python -m pyparallel topology --ranks 16" in alone
    shown = [line.split()[0] for line in alone.splitlines() if line.startswith("    ")]
    assert sorted(shown) == sorted(cli.__all__)


def test_every_help_has_an_example_that_is_valid_and_defaults(call):
    for name in cli.__all__:
        status, text, _ = call(name, "-h")
        example = importlib.import_module(f"pyparallel.cli.{name}").EXAMPLE
        assert status == 0
        assert f"example: {example}" in " ".join(text.split())
        assert example.startswith(f"python -m pyparallel {name}")
    for name, default in [
        ("topology", "(default: 8)"), ("topology", "(default: 25e6)"), ("plan", "(default: 4)"),
        ("plan", "(default: 2.0)"), ("recommend", "(default: 0.2)"),
    ]:  # fmt: skip
        assert default in " ".join(call(name, "-h")[1].split())


def test_the_examples_run(call, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("doctor", "topology", "plan", "simulate"):  # recommend's measures for minutes
        example = importlib.import_module(f"pyparallel.cli.{name}").EXAMPLE
        status, text, _ = call(*shlex.split(example)[3:])
        assert status == 0
        assert text.count("\n") > 5


def test_an_unknown_command_is_refused(call):
    for arguments in (["plot"], ["--ranks", "8"]):
        status, _, error = call(*arguments)
        assert status == 2
        assert "invalid choice" in error
