"""The benchmark of interlocking backpropagation runs at small sizes; no time is asserted."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.harness.pictures import drawn
from benchmarks.interlocking import cotangents
from benchmarks.interlocking.bench import CORES, COUNTS, DRY, FIELDS, PARTS
from benchmarks.interlocking.picture import PICTURES
from benchmarks.interlocking.straggler import Slowdown, Straggler
from benchmarks.interlocking.windows import SleepingHead, end_to_end, every_window
from pyparallel.pipeline.interlocking.stage import InterlockingStage
from pyparallel.pipeline.runtime.microbatches import MicrobatchSplitter
from pyparallel.pipeline.runtime.stage_weights import LiveWeights

ROOT = Path(__file__).resolve().parents[3]


def names(systems):
    return [system.name for system in systems]


@pytest.mark.slow
def test_the_dry_run_measures_every_part(tmp_path):
    rows = tmp_path / "rows.csv"
    command = [sys.executable, "-m", "benchmarks.interlocking.bench", "--dry-run", "--out"]
    done = subprocess.run(
        [*command, str(rows)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with rows.open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == FIELDS
    assert {row["part"] for row in table} == {*PARTS}
    assert all(float(row["median_ms"]) > 0 for row in table)
    ours = names(every_window(DRY.ranks, SleepingHead(0, 0)))
    of_part = {part: [row for row in table if row["part"] == part] for part in PARTS}
    others = names(end_to_end(DRY.ranks, DRY.ranks))
    assert [row["system"] for row in of_part["windows"]] == [*ours, *others]
    assert [row["system"] for row in of_part["computing"]] == [*ours[:CORES], *others]
    steps = [row["case"] for row in of_part["straggler"]][: DRY.slowdown.slow + 1]
    assert steps == ["step t-1", "step t", "step t+1"]
    assert len(of_part["straggler"]) == (DRY.slowdown.slow + 1) * (DRY.ranks + 2)
    assert len(of_part["cotangents"]) == 2 * len(COUNTS) * len(DRY.computes)
    assert drawn(PICTURES, table, tmp_path) == ["windows", "straggler", "gradients-together"]


def test_torchs_schedule_needs_as_many_microbatches_as_stages():
    assert "torch 1F1B" not in names(end_to_end(4, 3))
    assert "torch 1F1B" in names(end_to_end(4, 4))


def test_the_straggler_is_slow_from_its_step_on_in_every_turn(monkeypatch):
    slept = []
    monkeypatch.setattr("benchmarks.interlocking.straggler.time.sleep", slept.append)
    layer = Straggler(Slowdown(normal=2, slow=1, seconds=0.5))
    for _ in range(6):
        layer(torch.ones(1, requires_grad=True)).sum().backward()
    assert slept == [0, 0, 0.5, 0, 0, 0.5]


def test_both_ways_give_the_same_gradients():
    for compute in DRY.computes:
        check_both_ways_give_the_same_gradients(compute)


def check_both_ways_give_the_same_gradients(compute):
    torch.manual_seed(0)
    module = compute.build()
    assert isinstance(module, nn.Module)
    stage = InterlockingStage(0, module, [], LiveWeights(None), None, None)
    output = stage.forward(
        0, compute.make_input().requires_grad_(), MicrobatchSplitter(None, None, 0, 1)
    )
    gradients = [(torch.randn_like(output),) for _ in range(3)]
    together, apart = (cotangents.input_vjp(stage, gradients, at_once) for at_once in (3, 1))
    assert len(together) == len(apart) == 3
    for (one,), (other,) in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other)
