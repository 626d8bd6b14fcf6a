import copy

import pytest
import torch
from torch import nn

from pyparallel.pipeline import Interleaved, OneForwardOneBackward, PipeDream, PipelineTrainer
from tests.workers import observe_ranks, run_ranks


def build_layers():
    torch.manual_seed(0)
    return [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def build(layers, schedule, split):
    return PipelineTrainer(
        layers, nn.functional.mse_loss, sgd, schedule,
        num_microbatches=2, split=split, max_norm=0.05,
    )  # fmt: skip


def train(rank, schedule, split):
    layers = build_layers()
    whole = copy.deepcopy(nn.Sequential(*layers))
    trainer = build(layers, schedule, split)
    optimizer = sgd(whole.parameters())
    torch.manual_seed(1)
    norms = []
    for _ in range(4):
        inputs, target = torch.randn(6, 4), torch.randn(6, 2)
        trainer.step(inputs, target)
        nn.functional.mse_loss(whole(inputs), target).backward()
        norms.append(nn.utils.clip_grad_norm_(whole.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    expected = whole.state_dict()
    for stage in trainer.stages:
        for name, value in stage.module.state_dict().items():
            torch.testing.assert_close(value, expected[name])
    return min(norms) > 0.05


@pytest.mark.parametrize(
    ("schedule", "split", "num_ranks"),
    [(OneForwardOneBackward(), [1, 2], 3), (Interleaved(), [1, 2, 3], 2)],
)
def test_the_norm_is_that_of_the_whole_model(schedule, split, num_ranks):
    assert run_ranks(num_ranks, train, schedule, split) == [True] * num_ranks


def clip_without_a_flush(rank):
    build(build_layers(), PipeDream(), [2])


def test_a_schedule_without_a_flush_is_refused():
    outcomes = observe_ranks(2, clip_without_a_flush, time_limit=40, group_timeout=10)
    message = "max_norm must be None with a schedule that does not flush, got 0.05: no stage ever"
    assert all(message in outcome.error for outcome in outcomes)
