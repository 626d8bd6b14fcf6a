"""``python -m pyparallel watch``, and the files that it reads."""

import json
import os
import subprocess
import sys
import time

import pytest

from pyparallel.__main__ import main
from pyparallel.cli import watch
from pyparallel.integrations.metrics_log import MetricsLog

DIES = """
import sys
from pyparallel.integrations.metrics_log import MetricsLog
log = MetricsLog(sys.argv[1], "rank-1")
log.write(7, {"loss": 1.5, "rank/waiting_seconds": 0.02})
raise SystemExit(1)
"""


@pytest.fixture
def call(monkeypatch, capsys):
    def run_here(*arguments):
        monkeypatch.setattr(sys, "argv", ["pyparallel", "watch", *map(str, arguments)])
        main()
        return capsys.readouterr().out.rstrip("\n")

    return run_here


def rows_of(text):
    head, *rows = [[cell.strip() for cell in line.split("  ") if cell] for line in text.split("\n")]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def change(path, **values):
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, json.dumps(json.loads(last) | values)]) + "\n")


def test_each_rank_has_a_row_with_its_state(tmp_path, call):
    subprocess.run([sys.executable, "-c", DIES, tmp_path], check=False)
    trains = MetricsLog(tmp_path, "rank-0")
    trains.write(0, {"loss": 5.0})
    trains.write(10, {"loss": 2.5, "rank/staleness": 1.0, "rank/push_sum_weight": 0.75})
    with MetricsLog(tmp_path, "rank-2") as log:
        log.write(12, {"stage0/staleness": 0.0, "stage1/staleness": 3.0, "epoch": 4.0})
    MetricsLog(tmp_path, "rank-3")
    elsewhere = MetricsLog(tmp_path, "rank-10")
    elsewhere.write(3, {"loss": float("nan")})
    change(tmp_path / "rank-0.jsonl", time=time.time() + 2)
    change(tmp_path / "rank-10.jsonl", time=time.time() - 31, place="another host")

    rows = rows_of(call(tmp_path))
    assert list(rows) == ["rank-0", "rank-1", "rank-2", "rank-3", "rank-10"]
    assert [rows[name]["state"] for name in rows] == [
        "training", "dead", "ended", "starting", "silent for 31 s",
    ]  # fmt: skip
    assert rows["rank-0"]["step"] == "10"
    assert rows["rank-0"]["loss"] == "2.500"
    assert 4.5 < float(rows["rank-0"]["steps/s"]) <= 5
    assert rows["rank-0"]["mass"] == "0.750"
    assert rows["rank-1"]["waiting, ms"] == "20.0"
    assert rows["rank-2"]["staleness"] == "3"
    assert rows["rank-2"]["epoch"] == "4"
    assert rows["rank-2"]["loss"] == "-"
    assert rows["rank-10"]["loss"] == "nan"


def test_a_rank_that_goes_on_after_a_restart_trains(tmp_path, call):
    with MetricsLog(tmp_path) as log:  # without a process group: torchrun's RANK, or 0
        log.write(5, {"loss": 2.0})
    MetricsLog(tmp_path).write(1, {"loss": 3.0})
    row = rows_of(call(tmp_path, "--once"))["rank-0"]
    assert row == {"rank": "rank-0", "step": "1", "loss": "3.000", "state": "training"}


def test_a_line_that_is_being_written_is_left_out(tmp_path, call):
    log = MetricsLog(tmp_path, "rank-0")
    for step in range(2000):  # longer than what is read
        log.write(step, {"loss": 1.0})
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write('{"step": 2000, "lo')
    assert rows_of(call(tmp_path))["rank-0"]["step"] == "1,999"


def test_an_error_in_the_context_is_not_an_end(tmp_path, call):
    def fail():
        with MetricsLog(tmp_path, "rank-0") as log:
            log.write(1, {"loss": 1.0})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert rows_of(call(tmp_path))["rank-0"]["state"] == "training"  # this process is alive


def test_on_a_terminal_it_follows_until_all_have_ended(tmp_path, call, monkeypatch):
    log = MetricsLog(tmp_path, "rank-0")
    log.write(1, {"loss": 1.0})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: (log.write(2, {}), log.close()))
    cleared, first, last = call(tmp_path).replace("\nrank ", "\x1b[Hrank ").split("\x1b[H")
    assert cleared == "\x1b[2J"
    assert rows_of(first)["rank-0"]["state"] == "training"
    assert rows_of(last)["rank-0"] | {"steps/s": "-"} == {
        "rank": "rank-0", "step": "2", "steps/s": "-", "state": "ended",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "must hold a file rank-0.jsonl, got none; write it with"),
        ('{"step": 1}\n{"step": 2}\n', 'must hold lines of MetricsLog, got {"step": 2}'),
        ('{"step": 1}\nnot JSON\n', "must hold lines of MetricsLog, got not JSON"),
    ],
)
def test_a_folder_of_something_else_is_one_sentence(tmp_path, call, content, sentence):
    if content:
        (tmp_path / "rank-0.jsonl").write_text(content)
    with pytest.raises(SystemExit) as raised:
        call(tmp_path)
    assert sentence in str(raised.value)
    assert os.linesep not in str(raised.value)
