"""The paper's table in small: its models, its rule for rates, and the table."""

import math
from argparse import Namespace

import pytest
import torch

from benchmarks.harness.rows import RunRows
from benchmarks.pipeline.compare import CONTESTANTS
from benchmarks.pipeline.paper import MODELS, SCHEDULES, Rule, find_runs, tables
from benchmarks.pipeline.tasks import FIELDS, train

LSTM = "LSTM, rule"


def test_every_model_trains_in_four_stages():
    for name, task in MODELS.items():
        model = task.build()
        assert len(task.split) == 3, name
        if isinstance(task, Rule):
            losses = train(task, CONTESTANTS["pipeoptim"], 0.01, 0, 8).losses
            assert losses[-1] < losses[0] - 0.3, name
        elif "images" in name:
            assert model(torch.zeros(2, 1, 14, 14)).shape == (2, 10), name


def test_the_rule_is_a_sum_of_two_symbols():
    symbols, sums = MODELS[LSTM].draw(3, torch.Generator())
    assert torch.equal(sums[:, 2:], (symbols[:, 2:] + symbols[:, :-2]) % 10)


def test_rates_are_searched_until_the_best_is_within_then_the_seeds_follow(tmp_path):
    rows = RunRows(tmp_path / "rows.csv", FIELDS, num_keys=4)
    options = Namespace(models=[LSTM], schedules=SCHEDULES, seeds=[0, 1, 2], out=rows.path)
    bests = dict(zip(SCHEDULES, (0.032, 0.004, 0.001, 0.008, 0.002, 0.004), strict=True))
    trained = {}

    def perform(run):
        trained.setdefault(run.name, []).append((round(run.rate / 0.004, 3), run.seed))
        loss = 1 + abs(math.log2(run.rate / bests[run.name])) - 0.1 * (run.name == "pipeoptim")
        return {"held_out_loss": str(loss)}

    rows.complete(find_runs(options), perform)
    first = [(0.5, 0), (1, 0), (2, 0)]
    assert trained["gpipe"] == [*first, (4, 0), (8, 0), (16, 0), (8, 1), (8, 2)]
    assert trained["pipedream"] == [*first, (1, 1), (1, 2)]
    assert trained["2bw"] == [*first, (0.25, 0), (0.125, 0), (0.25, 1), (0.25, 2)]
    lines = tables(list(rows.read().values())).splitlines()
    assert lines[2].startswith(f"| {LSTM} | 1.0000 at 0.032 |")
    assert lines[2].endswith(" | **0.9000** at 0.004 |")
    assert lines[-1] == "| xpipe | 1 of 1 | 3 of 3 | -10.0 % (-10.0 to -10.0) |"
    rows.complete(find_runs(options), lambda run: pytest.fail(f"{run} has a row"))
