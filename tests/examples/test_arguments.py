"""Arguments that the examples refuse, and the text that they read."""

import importlib
import sys
from pathlib import Path

import pytest

REFUSED = {
    "train_gossip": [
        (["--data", "text", "--epochs", "3"], "limit text by --steps"),
        (["--steps", "0"], "must be a positive integer, got 0"),
        *(([f"--slow-rank={text}"], f"got {text}") for text in ("2", "a:3", "1:0.5", "-1:2")),
    ],
    "train_pipeline": [
        (["--steps", "0"], "must be a positive integer, got 0"),
        (["--steps", "3"], "--steps must be at least 4"),
        (["--stages", "7"], "--stages must be at most the 6 layers of 4 blocks"),
        (["--data", "digits", "--stages", "5"], "must be at most the 4 layers of two convolutions"),
        (
            ["--data", "digits", "--width", "8"],
            "--blocks and --width must be used with --data text",
        ),
        (["--window", "2"], "--window must be used with --schedule interlocking, got pipeoptim"),
        (["--schedule", "interlocking", "--window", "3"], "number of stages, 2, got 3"),
        (["--batch-size", "3"], "at least one sample for each of 4 microbatches, got 3"),
        (["--width", "6"], "--width must be a multiple of the 4 heads of attention, got 6"),
        (["--schedule", "nope"], "invalid choice: 'nope'"),
    ],
    "train_subnets": [
        (["--data", "text", "--epochs", "3"], "text is bounded by --steps"),
        (["--interval", "0"], "must be a positive integer, got 0"),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused(monkeypatch, capsys, name):
    monkeypatch.syspath_prepend("examples")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    example = importlib.import_module(name)
    ranks = (1,) if name == "train_pipeline" else ()
    for arguments, message in REFUSED[name]:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as end:
            example.parse_arguments(*ranks)
        assert end.value.code == 2, arguments
        assert message in capsys.readouterr().err, arguments


def test_stages_that_ranks_do_not_divide_are_refused(monkeypatch, capsys):
    monkeypatch.syspath_prepend("examples")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["train_pipeline", "--stages", "3"])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("train_pipeline").main()
    message = "num_stages must be a multiple of num_ranks, got 3 stages for 2 ranks"
    assert message in capsys.readouterr().err


def test_the_text_does_not_depend_on_the_order_of_folders(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend("examples")
    find_files = importlib.import_module("standard_library").find_files
    names = ["b.py", "a/__init__.py", "a/x.py", "a/test/__init__.py", "a/tests/t.py", "no/x.py"]
    for name in [*names, "a/c/__init__.py", "a/data.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    expected = ["a/__init__.py", "a/c/__init__.py", "a/x.py", "b.py"]
    iterdir = Path.iterdir
    for order in (sorted, lambda paths: sorted(paths, reverse=True)):
        monkeypatch.setattr(Path, "iterdir", lambda path, order=order: iter(order(iterdir(path))))
        assert [path.relative_to(tmp_path).as_posix() for path in find_files(tmp_path)] == expected
