"""The time-to-accuracy benchmark: shards, rows, table, picture; times are not asserted."""

import pytest
import torch

from benchmarks.harness.pictures import drawn
from benchmarks.harness.ranks import run_on_loopback
from benchmarks.harness.rows import read_rows
from benchmarks.pipeline.tasks import load_images
from benchmarks.subnets import compare as compare_subnets
from benchmarks.subnets.compare import FIELDS, Budget, count_bytes, race, steps_due
from benchmarks.subnets.methods import DDP, DDP_BF16, SGD, LocalSteps, Subnets, states_of
from benchmarks.subnets.picture import PICTURES
from benchmarks.subnets.table import Curve, markdown, measure_of, time_to_target
from benchmarks.subnets.tasks import Bytes, Digits


@pytest.mark.slow
def test_the_dry_run_writes_rows_and_prints_the_table(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.csv"
    arguments = ["--dry-run", "--tasks", "digits", "--methods", "SubnetTrainer", "--seeds", "5"]
    monkeypatch.setattr("sys.argv", ["compare_subnets", *arguments, "--out", str(path)])
    compare_subnets.main()
    (row,) = read_rows(path)
    assert list(row) == FIELDS
    assert row["options"].startswith("Subnets(interval=20, scale=Unscaled(), optimizer_state=")
    assert float(row["at_score"].split()[-1]) == float(row["score"])
    assert int(row["at_steps"].split()[-1]) == int(row["steps"]) > 0
    assert float(row["sent_bytes_of_rank"]) > 0
    assert drawn(PICTURES, [row], tmp_path) == ["digits"]
    assert markdown([row]) in capsys.readouterr().out


def train_all(rank):
    """Return this rank's shard, a run of every method, and one run's bytes."""
    digits, tiny = Digits(width=8), Bytes(width=16, context=8, batch_size=2)
    methods = (DDP, DDP_BF16, LocalSteps(3), Subnets(3))
    runs = [race(rank, digits, each, SGD(0.1), 0, Budget(0.05, 0.05)) for each in methods]
    runs.append(race(rank, tiny, Subnets(1), SGD(0.01), 0, Budget(1e-6, 1.0)))
    return digits.calibration()[0].flatten(1).tolist(), runs


@pytest.mark.slow  # five trainings on two ranks
def test_ranks_have_their_own_data_and_the_same_clock():
    answers = run_on_loopback(2, 90, train_all)
    shards, runs = zip(*answers, strict=True)
    everything = load_images()[0].flatten(1).tolist()
    assert sorted([*shards[0], *shards[1]]) == sorted(everything)
    for first, second in zip(*runs, strict=True):
        assert [point.steps for point in first.points] == [point.steps for point in second.points]
        assert [p.seconds for p in first.points] == [p.seconds for p in second.points]
        assert first.points[-1].score > 0
        assert second.points[-1].score == 0  # only rank 0 reads the held-out data
    replica, _, _, part, _ = runs[0]
    assert part.held_bytes < replica.held_bytes


def test_evaluations_are_denser_at_first_and_stop_in_time():
    for *now, due in [
        (1, 0.5, 100.0, 3),  # three times as many, at first
        (30, 3.0, 100.0, 20),  # as many as fit into two seconds
        (30, 3.0, 0.5, 5),  # as many as remain
        (1, 5.0, 100.0, 1),
        (1, 0.5, 0.2, 0),
        (30, 3.0, -0.1, 0),
        (30, 3e-3, 1e-3, 0),  # too little time for another
    ]:
        assert steps_due(*now, every=2.0) == due, now


def test_bytes_of_nested_state_are_those_of_its_tensors():
    layer = torch.nn.Linear(3, 2)
    optimizer = SGD(0.1)(list(layer.parameters()))
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert count_bytes(states_of(layer, optimizer)()) == 2 * 4 * (3 * 2 + 2)
    assert count_bytes({"step": 3, "names": ["a"]}) == 0


def test_time_to_the_baselines_final_accuracy():
    curve = Curve([0, 1, 2], [0, 5, 9], [0, 10, 20], [0.1, 0.95, 0.97])
    digits, text = measure_of("digits"), measure_of("bytes")
    assert time_to_target(curve, 0.955, digits) == (1, 10)
    assert time_to_target(curve, 0.975, digits) == (2, 20)
    assert time_to_target(curve, 0.99, digits) is None
    falling = Curve([0, 1, 2], [0, 5, 9], [0, 10, 20], [8.0, 4.0, 3.0])
    assert time_to_target(falling, 3.95, text) == (1, 10)  # 1.3 % above it
