"""The comparison of schedules: what it trains, its rows, its table and its picture."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.harness.learning_rate import rate as rate_at
from benchmarks.harness.pictures import drawn
from benchmarks.pipeline.compare import CONTESTANTS
from benchmarks.pipeline.picture import PICTURES
from benchmarks.pipeline.table import ACCURACY, HELD_OUT, finite_differences
from benchmarks.pipeline.tasks import FIELDS, TASKS, Contestant, Run, perform, train
from pyparallel.comm import DisagreementError

DIGITS, ADAM, ADAMW = TASKS
UPDATES = 6


def plain_losses(task, rate, seed, updates):
    """Train without a pipeline, on the same batches."""
    torch.manual_seed(seed)
    model = task.build()
    optimizer = task.make_optimizer(model.parameters(), lr=rate)
    losses = []
    for update, (inputs, target) in enumerate(itertools.islice(task.batches(seed), updates)):
        optimizer.param_groups[0]["lr"] = rate * rate_at(update, updates)
        optimizer.zero_grad()
        loss = task.loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(task.units_per_nat * loss.item())
    inputs, target = task.held_out()
    with torch.no_grad():
        return losses, task.units_per_nat * task.loss(model(inputs), target).item()


@pytest.mark.slow
def test_gpipe_is_training_without_a_pipeline():
    for task in TASKS:
        losses, held_out = plain_losses(task, task.main_rate, 3, UPDATES)
        outcome = train(task, CONTESTANTS["gpipe"], task.main_rate, 3, UPDATES)
        assert outcome.losses == pytest.approx(losses, rel=1e-4), task.name
        assert outcome.held_out_loss == pytest.approx(held_out, rel=1e-4), task.name


def test_every_schedule_updates_once_for_each_batch(monkeypatch):
    steps = []
    step = torch.optim.SGD.step

    def counted(optimizer, *arguments):
        steps.append(optimizer)
        return step(optimizer, *arguments)

    monkeypatch.setattr(torch.optim.SGD, "step", counted)
    for name, contestant in CONTESTANTS.items():
        steps.clear()
        outcome = train(DIGITS, contestant, 0.01, 0, UPDATES)
        assert len(steps) == 4 * UPDATES, name  # of four stages
        assert len(outcome.losses) == UPDATES, name
        assert 0 < outcome.held_out_loss < 3, name
        assert 0 <= outcome.held_out_accuracy <= 1, name


@pytest.mark.slow
def test_the_initial_weights_do_not_depend_on_the_schedule():
    firsts = [train(ADAM, each, 1e-3, 1, 1).losses[0] for each in CONTESTANTS.values()]
    assert firsts == pytest.approx([firsts[0]] * len(firsts), rel=1e-5)


@pytest.mark.slow
def test_a_run_that_diverges_is_a_row(tmp_path):
    runs = [Run(DIGITS, name, CONTESTANTS[name], 0.04, 0) for name in ("naive", "gpipe")]
    rows = [
        dict(zip(FIELDS, run.key, strict=False)) | perform(replace(run, rate=rate), updates=12)
        for run, rate in zip(runs, (1e4, 0.04), strict=True)
    ]
    assert {*rows[0]} == {*FIELDS} - {"torch", "commit"}
    assert rows[0]["training_loss"] == rows[0]["held_out_loss"] == "inf"
    assert rows[0]["held_out_accuracy"] == ""
    assert rows[0]["losses"].split()[-1] == "inf"
    assert drawn(PICTURES, rows, tmp_path) == ["accuracy", "losses", "rates"]


def test_other_failures_are_not_taken_for_divergence():
    class Wrong(nn.Linear):
        def forward(self, inputs):
            raise ValueError("not this")

    broken = replace(DIGITS, name="broken", split=(1, 2, 3))
    object.__setattr__(broken, "build", lambda: nn.Sequential(*(Wrong(1, 1) for _ in range(4))))
    with pytest.raises(DisagreementError, match="not this"):
        train(broken, Contestant(CONTESTANTS["naive"].schedule, 1), 0.1, 0, 2)


def make_row(schedule="pipeoptim", seed=0, rate=0.04, loss=0.5, accuracy="0.97", task=DIGITS):
    return {
        **dict.fromkeys(FIELDS, "1"), "task": task.name, "schedule": schedule, "seed": str(seed),
        "rate": f"{rate:g}", "training_loss": str(loss), "held_out_loss": str(loss),
        "held_out_accuracy": accuracy, "losses": f"2.0 {loss}", "options": f"{schedule}()",
    }  # fmt: skip


def test_differences_are_by_seed_without_diverged_runs():
    exact = [make_row("gpipe", seed, accuracy="0.96") for seed in (0, 1, 2)]
    ours = [make_row(seed=0), make_row(seed=1, loss=float("inf"), accuracy=""), make_row(seed=7)]
    assert finite_differences(ours, exact, ACCURACY) == pytest.approx([1])
    better = [make_row(seed=0, loss=0.45)]
    assert finite_differences(better, exact, HELD_OUT) == pytest.approx([-10])
