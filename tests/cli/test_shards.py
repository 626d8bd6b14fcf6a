"""``python -m pyparallel shards``: what a rank holds and sends of a sharded Llama."""

import sys

import pytest

from pyparallel.__main__ import main


@pytest.fixture
def call(monkeypatch, capsys):
    """Run the command in this process; return the values that it printed."""

    def run_here(*arguments):
        monkeypatch.setattr(sys, "argv", ["pyparallel", "shards", *arguments])
        main()
        lines = capsys.readouterr().out.splitlines()
        return [line[46:].strip() for line in lines]

    return run_here


SMALL = ("--layers", "2", "--hidden", "256", "--intermediate", "768", "--vocabulary", "1024")


def test_a_rank_sends_a_share_of_the_model(call):
    numel = 2 * (4 * 256**2 + 3 * 256 * 768 + 2 * 256) + 2 * 1024 * 256 + 256
    printed = call(*SMALL, "--shards", "4", "--replicas", "8", "--bucket-cap-mb", "1")
    share = numel // 4
    assert printed[:2] == [f"{numel:,}", f"{share:,} in float32"]
    assert printed[3:] == [f"{4 * share:,}"] * 2 + ["0.2500, with 4 shards", "3"]
    printed = call(*SMALL, "--shards", "3", "--bfloat16")
    assert printed[1].endswith("in bfloat16")


def test_numbers_must_be_positive(call):
    with pytest.raises(SystemExit, match="shards: --shards must be positive, got 0"):
        call("--shards", "0")
