"""The restarts of ``make soak``: what is seen of them, and three."""

import pytest

from benchmarks.soak import __main__ as soak
from benchmarks.soak.faults.trial import End, Outcome
from benchmarks.soak.restarts import (
    FIELDS,
    KEY,
    OK,
    TIMEOUT,
    campaign,
    find_problems,
    last_checkpoint,
    summarize,
)

TEXT = "rank 1 (stage 1) died, or ended without this call: rank 0 waited for the update"


def killed(ends=None, struck=True):
    """Return the outcome of killing rank 1, with other ends of some ranks."""
    raised = End(1, ("pyparallel.pipeline.StageError", TEXT), ended=1.5)
    return Outcome(list(({0: raised, 1: End(-9), 2: raised} | (ends or {})).values()), 0, struck)


def test_broken_requirements_are_seen():
    assert find_problems(killed(), 1, equal=True) == []
    other = ("pyparallel.pipeline.StageError", TEXT.replace("rank 0 waited", "rank 2 waited"))
    silent = ["rank 2 raised nothing"]
    for outcome, problems in [
        (killed({2: End(None)}), ["rank 2 hangs", *silent]),
        (killed({2: End(1, ("RuntimeError", TEXT))}), silent),
        (killed({2: End(1, other)}), ["the messages differ"]),
        (killed({2: End(1, (other[0], TEXT), ended=TIMEOUT + 1)}),
         ["a rank ended after the timeout"]),
        (killed(struck=False), ["the rank was not killed"]),
    ]:  # fmt: skip
        assert find_problems(outcome, 1, equal=True) == problems
    blamed = find_problems(killed(), 2, equal=False)
    assert blamed[-1] == "other losses or weights after the restart"
    assert "rank 0 does not name the victim" in blamed


def test_the_last_checkpoint_is_one_of_all_ranks(tmp_path):
    assert last_checkpoint(tmp_path) is None
    for name in ("0-0.pt", "0-1.pt", "0-2.pt", "5-0.pt", "5-1.pt", "5-2.part"):
        (tmp_path / name).touch()
    assert last_checkpoint(tmp_path) == 0
    (tmp_path / "5-2.part").rename(tmp_path / "5-2.pt")
    assert last_checkpoint(tmp_path) == 5


def test_rows_are_written_and_trials_that_fail_are_returned(monkeypatch, tmp_path, capsys):
    row = dict.fromkeys(FIELDS, "") | {"trial": 0, "last_end_s": "1.50", "messages": 1}
    row |= {"equal": "yes", "verdict": OK}
    bad = row | {"trial": 1, "last_end_s": "2.50", "messages": 2, "verdict": "the messages differ"}
    monkeypatch.setattr(soak.restarts, "campaign", lambda trials, seed: iter([row, bad]))
    path = tmp_path / "rows.csv"
    options = soak.parse(["--part", "restarts", "--out", str(path)])
    assert soak.watch_restarts(options) == ["restart 1: the messages differ"]
    assert path.read_text().startswith(",".join(FIELDS))
    assert KEY == ["trial"]
    figures = "ended after 2.00 s (median), 2.50 s (most); one message in 1; bit for bit"
    assert figures in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_bit_for_bit():
    rows = [{name: str(each) for name, each in row.items()} for row in campaign(3, 1)]
    assert [row["verdict"] for row in rows] == [OK] * 3, rows
    assert "one message in 3; bit for bit after the restart 3" in summarize(rows)
