"""The examples' files, their short runs on two ranks, and the arguments that they refuse."""

import contextlib
import importlib
import io
import re
import shlex
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.examples.as_user import load_line, numbers, rows_of
from tests.workers import run_ranks

ROOT = Path(__file__).resolve().parents[2]
# The arguments and, per example, the row that must be better than untrained and by how much.
RUNS = {
    "gossip": (["--epochs", "3"], "test accuracy", 30),
    "pipeline": (["--steps", "20"], "held-out bits per byte", -1),
    "subnets": (["--epochs", "2", "--interval", "5"], "test accuracy", 30),
    "ddp_compression": (["--epochs", "4", "--compressor", "int8"], "test accuracy", 30),
    "gan": (["--steps", "100"], "distance to held-out digits", -3),
}
PICTURES = {
    "gossip": "sgp.png",
    "pipeline": "pipeoptim.png",
    "subnets": "every-5-steps.png",
    "ddp_compression": "int8.png",
    "gan": "sgp.png",
}


def run_all(rank, folder):
    """Run every example in this process; return what it printed, and what it wrote by run."""
    sys.path.insert(0, "examples")
    torch.set_num_threads(1)
    printed, written = {}, {}
    tensorboard = mock.MagicMock(SummaryWriter=partial(Writer, written))
    for name, (arguments, *_) in RUNS.items():
        shown = io.StringIO()
        with (
            mock.patch.object(
                sys,
                "argv",
                [f"{name}.py", *arguments, "--out", str(folder / name), "--tensorboard", name],
            ),
            mock.patch.dict("sys.modules", {"torch.utils.tensorboard": tensorboard}),
            mock.patch.dict("os.environ", RANK=str(rank)),
            mock.patch.object(dist, "init_process_group"),  # the group of the test serves
            mock.patch.object(dist, "destroy_process_group"),
            contextlib.redirect_stdout(shown),
        ):
            importlib.import_module(name).main()
        printed[name] = shown.getvalue()
    return printed, written


class Writer:
    """Stands in for TensorBoard's: keeps the steps and last value of each name."""

    def __init__(self, written, run):
        self.scalars = written.setdefault(run, {})

    def add_scalar(self, name, value, step):
        assert type(value) is float
        self.scalars.setdefault(name, {})[step] = value

    def flush(self):
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def results(folder):
    return run_ranks(2, run_all, folder)


@pytest.fixture(scope="module")
def printed(results):
    (first, _), (second, _) = results
    assert set(second.values()) == {""}  # only rank 0 prints
    return first


@pytest.mark.slow  # trains for half a minute
def test_every_rank_writes_its_metrics(results, subtests):
    runs = ["gossip/all-reduce", "gossip/sgp", "pipeline/1f1b", "pipeline/pipeoptim"]
    runs += ["subnets/subnets", "ddp_compression/int8", "gan/all-reduce", "gan/sgp"]
    for (rank, (_, written)), run in product(enumerate(results), runs):
        with subtests.test(rank=rank, run=run):
            scalars = written[f"{run}/rank-{rank}"]
            sent = list(scalars["rank/bytes_sent"].values())
            assert len(sent) > 3
            assert 0 <= sent[0] < sent[-1]
            assert sent == sorted(sent)
            assert max(scalars["rank/waiting_seconds"].values()) > 0


@pytest.mark.slow  # trains for half a minute
def test_both_trainings_learn(printed, subtests):
    for name, (_, row, change) in RUNS.items():
        with subtests.test(name):
            untrained, exact, ours = numbers(rows_of(printed[name])[row])
            for trained in (exact, ours):
                assert (trained - untrained) / change > 1, printed[name]


@pytest.mark.slow  # trains for half a minute
def test_what_each_table_claims(printed):
    rows = {name: rows_of(text) for name, text in printed.items()}
    exact, sgp = numbers(rows["gossip"]["ranks differ by"])
    assert exact == 0 < sgp < 0.2
    for name in ("gossip", "subnets", "ddp_compression", "gan"):
        exact, ours = numbers(rows[name]["kB a rank sends per step"])
        assert 0 < ours <= exact  # two ranks send as much by gossip as by all-reduce
    assert rows["pipeline"]["weight copies by stage"] == ["1 1", "2 1"]
    assert rows["pipeline"]["updates per step"] == ["1", "4"]
    assert all(0 < share < 100 for share in numbers(rows["pipeline"]["ranks wait"]))
    whole, subnet = numbers(rows["subnets"]["weights in training"])
    assert whole == 284_490
    assert subnet < 0.4 * whole


@pytest.mark.slow  # trains for half a minute
def test_pictures_are_drawn(printed, folder):
    for name, picture in PICTURES.items():
        assert (folder / name / picture).read_bytes().startswith(b"\x89PNG")
        assert f"Picture:  {folder / name / picture}\n" in printed[name]


# What the loaded model must score, as its example printed it.
ACCURACY = (
    "from examples.data import load_digits; from examples.models import accuracy; "
    "print(f'{100 * accuracy(model, *load_digits()[2:]):.1f} %')"
)
BITS_PER_BYTE = (
    "from examples.data import *; from examples.models import byte_loss; "
    "windows = cut_windows(as_tensor(load_files()[1]), 256, 129); "
    "print(f'{byte_loss(model(windows[:, :-1]), windows[:, 1:]).item() / 0.6931471805599453:.3f}')"
)
DISTANCE = (
    "from examples.data import load_digits; from examples.digits_gan import *; "
    "torch.manual_seed(0); digits = generate(model, torch.randn(360, NOISE)); "
    "print(f'{frechet_distance(digits, load_digits()[2]):.2f}')"
)


@pytest.mark.slow  # trains for half a minute
def test_the_printed_lines_load_the_trained_models(printed):
    scores = [{"pipeline": BITS_PER_BYTE, "gan": DISTANCE}.get(name, ACCURACY) for name in printed]
    lines = map("; ".join, zip(map(load_line, printed.values()), scores, strict=True))
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    expected = [rows_of(text)[RUNS[name][1]][-1] for name, text in printed.items()]
    assert done.stdout.splitlines() == expected


@pytest.mark.slow  # trains for half a minute
def test_the_next_command_exists(printed, subtests):
    for name, text in printed.items():
        with subtests.test(name):
            target, arguments = re.search(r'make (train-\w+) ARGS="(.+)"', text).groups()
            recipe = (ROOT / "Makefile").read_text().partition(f"\n{target}:")[2].split("\n\n")[0]
            assert f"examples/{name}.py $(ARGS)" in recipe
            assert arguments.split() not in RUNS[name][0]
            parse(name, *shlex.split(arguments))


def parse(name, *arguments):
    """Run an example until it would join the other ranks."""
    sys.path.insert(0, str(ROOT / "examples"))
    module = importlib.import_module(name)
    with (
        mock.patch.object(sys, "argv", [f"{name}.py", *arguments]),
        mock.patch.object(module, "join_ranks", side_effect=InterruptedError),
        contextlib.suppress(InterruptedError),
    ):
        module.main()


def test_bad_arguments_are_refused(capsys):
    for name, arguments, message in [
        ("gossip", ["--algorithm", "nope"], "invalid choice: 'nope'"),
        ("gossip", ["--topology", "nope"], "invalid choice: 'nope'"),
        ("gossip", ["--epochs", "0"], "--epochs: must be a positive integer, got 0"),
        ("pipeline", ["--schedule", "nope"], "invalid choice: 'nope'"),
        ("pipeline", ["--steps", "1.5"], "--steps: must be a positive integer, got 1.5"),
        ("subnets", ["--interval", "-3"], "--interval: must be a positive integer, got -3"),
        ("ddp_compression", ["--compressor", "nope"], "invalid choice: 'nope'"),
        ("ddp_compression", ["--seed", "a"], "invalid int value: 'a'"),
        ("gan", ["--algorithm", "nope"], "invalid choice: 'nope'"),
    ]:
        with pytest.raises(SystemExit) as end:
            parse(name, *arguments)
        assert end.value.code == 2, arguments
        assert message in capsys.readouterr().err, arguments


def test_a_script_without_torchrun_names_it(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.syspath_prepend("examples")
    with pytest.raises(SystemExit, match="start it by: torchrun --standalone"):
        importlib.import_module("ranks").join_ranks(0)


def test_metrics_are_written_for_tensorboard(monkeypatch):
    monkeypatch.syspath_prepend("examples")
    ranks = importlib.import_module("ranks")
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # not installed
    ranks.log_metrics(None, "1f1b", {"loss": 1.0}, 0)
    with pytest.raises(SystemExit, match="a package that is missing: pip install tensorboard"):
        ranks.log_metrics("runs", "1f1b", {"loss": 1.0}, 0)
    tensorboard = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    for step in range(2):
        ranks.log_metrics("runs", "1f1b", {"loss": 1.0, "rank/busy_seconds": 0.5}, step)
    tensorboard.SummaryWriter.assert_called_once_with("runs/1f1b/rank-1")
    calls = tensorboard.SummaryWriter.return_value.add_scalar.call_args_list
    names = ("loss", 1.0), ("rank/busy_seconds", 0.5)
    assert [call.args for call in calls] == [(*each, step) for step in range(2) for each in names]


def test_no_file_hides_a_module_of_python():
    files = sorted((ROOT / "examples").glob("*.py"))
    assert {file.stem for file in files} >= RUNS.keys()
    for file in files:
        # Examples come first on sys.path; Python 3.14 has a module named compression.
        assert file.stem not in sys.stdlib_module_names | {"compression"}, file


def test_the_text_does_not_depend_on_the_order_of_folders(tmp_path, monkeypatch):
    find_files = importlib.import_module("examples.data").find_files
    names = ["b.py", "a/__init__.py", "a/x.py", "a/test/__init__.py", "a/tests/t.py", "no/x.py"]
    for name in [*names, "a/c/__init__.py", "a/data.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    expected = ["a/__init__.py", "a/c/__init__.py", "a/x.py", "b.py"]
    iterdir = Path.iterdir
    for order in (sorted, lambda paths: sorted(paths, reverse=True)):
        monkeypatch.setattr(Path, "iterdir", lambda path, order=order: iter(order(iterdir(path))))
        assert [path.relative_to(tmp_path).as_posix() for path in find_files(tmp_path)] == expected
