"""The comparison of optimizers in asynchronous pipelines: its rule for rates, rows and tables."""

import math

import pytest

from benchmarks.harness.rows import read_rows, write_rows
from benchmarks.pipeline.optimizers import (
    FIELDS,
    IN_TWO,
    MAKERS,
    MODELS,
    Rows,
    Run,
    choose_rate,
    finals,
    perform,
)

RUN = Run(4, "muon", "PipeOptim", "error feedback", 0.006, 2)


class Scored:
    """Rows whose scores have their minimum at one rate."""

    def __init__(self, best):
        self.best, self.runs = best, []

    def score(self, run):
        self.runs.append(run)
        return abs(math.log(run.rate / self.best))


@pytest.mark.parametrize("best", [0.0007, 0.006, 0.0085, 0.012, 0.1])
def test_the_chosen_rate_is_within_a_quarter_of_an_octave_of_the_best(best):
    rows = Scored(best)
    rate = choose_rate(rows, RUN)
    assert abs(math.log2(rate / best)) < 0.3
    rates = sorted(run.rate for run in rows.runs)
    assert rates[0] < rate < rates[-1]  # no end of what was tried


def test_muon_has_the_matrices_of_blocks_and_nothing_else():
    for model, blocks in ((MODELS[4], 2), (MODELS[8], 6), (IN_TWO, 4)):
        layers = model.build()
        muon = list(MAKERS["muon"](list(layers.parameters()), lr=1.0))
        shapes = [tuple(p.shape) for p in muon[0].param_groups[0]["params"]]
        width = model.width
        of_block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        assert shapes == of_block * blocks
        held = sum(len(group["params"]) for each in muon for group in each.param_groups)
        assert held == len(list(layers.parameters()))


def test_a_run_is_a_row_that_is_performed_once(tmp_path):
    rows = Rows(tmp_path / "rows.csv")
    score = rows.score(RUN)
    (row,) = read_rows(tmp_path / "rows.csv")
    assert list(row) == FIELDS
    assert tuple(row[name] for name in FIELDS[:7]) == RUN.key
    assert row["weight_copies"] == "2 2 2 1"
    assert row["options"].endswith(", UpdateErrorFeedback(coefficient=1.0)")
    assert float(row["held_out_bits"]) == score == float(perform(RUN)["held_out_bits"])
    write_rows([{**row, "held_out_bits": "1.5"}], tmp_path / "rows.csv", FIELDS)
    assert Rows(tmp_path / "rows.csv").score(RUN) == 1.5


def test_the_long_runs_are_at_the_own_rate_and_at_that_of_gpipe():
    found = {
        (schedule, "none"): (0.01, 3.0)
        for schedule in ("2BW", "PipeOptim", "PipeOptim, consistent")
    }
    found |= {("GPipe", "none"): (0.02, 2.9), ("2BW", "error feedback"): (0.02, 2.95)}
    found |= {("PipeDream", "error feedback"): (0.01, 3.1)}
    runs = list(finals(4, "muon", found))
    of_seed = [(run.schedule, run.correction, run.rate) for run in runs if run.seed == 1]
    assert of_seed == [
        ("GPipe", "none", 0.02),
        *(
            (s, "none", r)
            for s in ("2BW", "PipeOptim", "PipeOptim, consistent")
            for r in (0.01, 0.02)
        ),
        ("2BW", "error feedback", 0.02),
    ]
    assert {run.seed for run in runs} == {0, 1, 2, 3, 4}
    deep = [run.rate for run in finals(8, "muon", found) if run.seed == 2]
    assert deep == [0.02, 0.01, 0.01, 0.01, 0.02]
    assert {run.updates for run in runs} == {1500}
