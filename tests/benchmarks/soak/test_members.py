"""The soak of members: what is read from the logs of its processes, and three faults."""

import pytest

from benchmarks.soak import members
from benchmarks.soak.member_logs import summarize
from benchmarks.soak.members import Case, Run, perform


def log(pid, *rows):
    return [{"pid": pid, **row} for row in rows]


def change(time, epoch, names, *, left=(), weight=1.0):
    what = {"epoch": epoch, "members": names, "left": list(left)}
    return {"time": time, "change": what, "weight": weight}


def step(time, seconds, *, kept=True):
    return {"time": time, "seconds": seconds, "kept": kept}


def member(time, epoch, weight, **held):
    return {"time": time, "member": True, "epoch": epoch, "weight": weight, **held}


def test_logs_are_read():
    held = {"kb": 1000, "fds": 9}
    end = {"accuracy": 0.9, "kb": 1500, "fds": 9}
    logs = {
        "a": log(
            1,
            change(0.0, 1, ["a", "b"], weight=None),
            member(0.0, 1, 1.0, **held),
            step(1.0, 1.0),
            change(3.4, 2, ["a"], left=["b"], weight=1.0),
            step(3.5, 2.5, kept=False),
            change(5.0, 3, ["a", "b"], weight=0.5),
            step(5.1, 1.1, kept=False),
            step(6.1, 1.0),
            {"time": 6.1, **end},
        ),
        "b": [
            *log(2, {"time": -1.0, "ready": True}, member(0.0, 1, 1.0, **held), step(1.0, 1.0)),
            *log(3, {"time": 4.0, "ready": True}, member(5.0, 3, 1.4, **held), step(6.0, 1.0)),
        ],
    }
    columns = summarize(logs)
    assert (columns["changes"], columns["steps"], columns["accuracy"]) == (2, 6, "0.9000")
    assert columns["rounds_kept"] == f"{4 / 6:.4f}"
    assert columns["efficiency"] == f"{6 * 1.0 / (6.1 + 1.0 + 1.0):.4f}"
    assert (columns["stall_s"], columns["join_s"], columns["rejoin_s"]) == (
        "1.500",
        "0.100",
        "1.000",
    )
    assert columns["weight_error"] == "5.0e-02"  # of epoch 3: 1.9 instead of 2
    assert (columns["growth_kb"], columns["more_fds"]) == (500, 0)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["SGP", "DiLoCo"])
def test_members_outlive_faults(algorithm, monkeypatch):
    pytest.importorskip("torchft")
    monkeypatch.setitem(members.CASES, "tiny", Case(4, 30, 0.02, 4.0))
    row = perform(Run(algorithm, "3", "tiny", 0))
    assert (row["faults"], row["hangs"]) == (4, 0)
    assert row["changes"] >= 4
    assert float(row["weight_error"]) < 1e-9
    assert float(row["accuracy"]) > 0.5
