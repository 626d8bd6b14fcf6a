"""The program that prints what stages cost, and draws the measured above the simulated timeline."""

import pytest

from benchmarks.pipeline import timeline


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["timeline", *arguments])
    timeline.main()


@pytest.mark.slow  # two trainings
def test_prints_a_row_for_each_stage_and_draws(tmp_path, monkeypatch, capfd, subtests):
    versions = {"staleness", "horizon"}
    for schedule, copies, has_losses in [
        ("pipeoptim", ["2", "1"], False),
        ("interlocking", ["1", "1"], True),
    ]:
        with subtests.test(schedule):
            out = tmp_path / f"{schedule}.png"
            run(monkeypatch, "--schedule", schedule, "--steps", "8", "--out", str(out))
            lines = capfd.readouterr().out.split("\n\n")[1].replace(", ms", "_ms").splitlines()
            header, *rows = (line.replace("weight copies", "copies").split() for line in lines)
            assert [row[header.index("copies")] for row in rows] == copies
            assert bool(versions & set(header)) != has_losses  # interlocking has no stale weights
            assert all(float(row[header.index("forward_ms")]) > 0 for row in rows)
            if has_losses:
                assert all(4 < float(row[-1]) < 8 for row in rows)
            assert out.read_bytes().startswith(b"\x89PNG")


def test_bad_arguments_are_refused(monkeypatch, capsys):
    for arguments, message in [
        (["--steps", "4"], "--steps must be at least 5, got 4"),
        (["--schedule", "interlocking", "--window", "3"], "number of stages, 2, got 3"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            run(monkeypatch, *arguments)
        assert message in capsys.readouterr().err
