"""The systems that the benchmark of pipelines compares do the same work."""

import pytest
import torch
from torch import nn

from benchmarks.harness.ranks import run_on_loopback
from benchmarks.pipeline.limit import simulated_seconds
from benchmarks.pipeline.models import ByteModel, SleepingModel, build_stages
from benchmarks.pipeline.systems import make_optimizer, ours
from benchmarks.pipeline.systems.ours import OURS
from benchmarks.pipeline.systems.peers import DEEP_PEERS
from pyparallel.pipeline import GPipe, PipeDream

SMALL = ByteModel(width=48, num_blocks=4, num_heads=2, microbatch=2, length=8)


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


@pytest.mark.slow  # 10 seconds
def test_every_schedule_that_flushes_trains_as_without_a_pipeline():
    # Where both stages of a V are on one rank, torch 2.11 sends to itself, which gloo cannot.
    peers = [each for each in DEEP_PEERS if torch.__version__ >= "2.12" or not each.in_v]
    flushing = [*OURS[: OURS.index(ours.PIPE_DREAM)], *peers]
    answers = run_on_loopback(2, 90, take_steps, flushing, 4)
    expected = train_without_a_pipeline(4)
    for system, *losses in zip(flushing, *answers, strict=True):
        known = [each for each in losses if each[0] is not None]  # torch's on the last rank alone
        assert known
        for found in known:
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
