"""The benchmark of the pipeline trainer runs at small sizes; no time is asserted."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.harness.link import loopback
from benchmarks.harness.pictures import drawn
from benchmarks.harness.ranks import run_ranks
from benchmarks.pipeline import parts
from benchmarks.pipeline.bench import (
    FIELDS,
    LINK_OURS,
    LINK_PEERS,
    PARTS,
    SMALL_OURS,
    SMALL_PEERS,
)
from benchmarks.pipeline.bubbles import simulated_seconds
from benchmarks.pipeline.limit import Limit
from benchmarks.pipeline.models import ByteModel, SleepingModel, build_stages
from benchmarks.pipeline.picture import PICTURES
from benchmarks.pipeline.systems import make_optimizer, ours
from benchmarks.pipeline.systems.ours import OURS
from benchmarks.pipeline.systems.peers import DEEP_PEERS, PEERS
from pyparallel.pipeline import GPipe, PipeDream

ROOT = Path(__file__).resolve().parents[3]
SMALL = ByteModel(width=48, num_blocks=4, num_heads=2, microbatch=2, length=8)


@pytest.mark.slow
def test_the_dry_run_measures_every_part(tmp_path):
    rows = tmp_path / "rows.csv"
    command = [sys.executable, "-m", "benchmarks.pipeline.bench", "--dry-run", "--out", str(rows)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with rows.open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == FIELDS
    assert {row["part"] for row in table} == {*PARTS}
    systems = {part: [row["system"] for row in table if row["part"] == part] for part in PARTS}
    names = [system.name for system in (*OURS, *PEERS)]
    assert systems["throughput"] == [Limit.name, *names]
    small = [system.name for system in (*SMALL_OURS, *SMALL_PEERS)]
    assert systems["small"] == [Limit.name, *small]
    link = [system.name for system in (*LINK_OURS, *LINK_PEERS)]
    assert systems["link"] == 2 * link
    assert systems["bubbles"] == [system.name for system in (*OURS, *DEEP_PEERS)]
    assert all(float(row["median_ms"]) > 0 for row in table if "difference" not in row["system"])
    copies = {row["system"]: row["weight_copies"] for row in table if row["part"] == "bubbles"}
    assert (copies["PipeDream"], copies["PipeOptim"]) == ("3 2 1", "2 2 1")
    assert drawn(PICTURES, table, tmp_path) == ["throughput", "bubbles"]


@pytest.mark.slow
def test_the_dry_run_measures_every_part_of_a_microbatch(tmp_path):
    rows = tmp_path / "rows.csv"
    command = [sys.executable, "-m", "benchmarks.pipeline.parts", "--dry-run", "--out", str(rows)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with rows.open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == parts.FIELDS
    assert {row["part"] for row in table} == {*parts.PARTS, parts.WHOLE}
    used = [row for row in table if row["system"] == "PipeOptim" and row["stage"] == "0"]
    assert all(float(row["median_ms"]) > 0 for row in used)


def take_steps(rank, systems, num_microbatches):
    trainings = [system.start(SMALL, num_microbatches) for system in systems]
    return [[training.step() for _ in range(3)] for training in trainings]


def train_without_a_pipeline(num_microbatches):
    model = nn.Sequential(*SMALL.build())
    optimizer = make_optimizer(model.parameters())
    inputs, target = SMALL.make_batch(num_microbatches)
    losses = []
    for _ in range(3):
        loss = SMALL.loss(model(inputs), target)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def test_every_schedule_that_flushes_trains_as_without_a_pipeline():
    # Where both stages of a V are on one rank, torch 2.11 sends to itself, which gloo cannot.
    peers = [each for each in DEEP_PEERS if torch.__version__ >= "2.12" or not each.in_v]
    flushing = [*OURS[: OURS.index(ours.PIPE_DREAM)], *peers]
    with loopback() as place:
        answers = run_ranks(2, place, 90, take_steps, flushing, 4)
    expected = train_without_a_pipeline(4)
    for system, *losses in zip(flushing, *answers, strict=True):
        (found,) = (each for each in losses if each[0] is not None)
        assert found == pytest.approx(expected, rel=1e-5), system.name


def test_stages_have_equal_work():
    for num_stages in (2, 4):
        stages = build_stages(SMALL, num_stages)
        work = [sum(m.weight.numel() for m in s.modules() if type(m) is nn.Linear) for s in stages]
        assert len(set(work)) == 1


def test_the_simulated_step_is_its_work_and_its_bubble():
    model = SleepingModel(num_layers=8, forward=0.04, backward=0.08)
    for schedule, ticks in [(GPipe(), 3 + 6), (PipeDream(), 6)]:
        found = simulated_seconds(lambda count: schedule.actions(4, 6, steps=count), model)  # noqa: B023
        assert found == pytest.approx(ticks * 0.03), schedule
