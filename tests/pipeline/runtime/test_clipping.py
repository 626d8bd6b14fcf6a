import copy

import pytest
import torch
from torch import nn

from pyparallel.pipeline import Interleaved, OneForwardOneBackward, PipeDream, PipelineTrainer
from tests.workers import run_ranks


def build_layers():
    torch.manual_seed(0)
    hidden = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()]
    return [*hidden, nn.Linear(8, 8), nn.Linear(8, 2)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def build(layers, schedule, split):
    return PipelineTrainer(
        layers, nn.functional.mse_loss, sgd, schedule,
        num_microbatches=2, split=split, max_norm=0.05,
    )  # fmt: skip


def train(schedule, split):
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


def clip_without_a_flush():
    with pytest.raises(ValueError, match="max_norm") as caught:
        build(build_layers(), PipeDream(), [2, 4])
    return str(caught.value)


def work(rank):
    return (
        train(OneForwardOneBackward(), [2, 4]),
        train(Interleaved(), [1, 2, 3, 4, 5]),
        clip_without_a_flush(),
    )


@pytest.fixture(scope="module")
def results():
    return run_ranks(3, work)


def test_the_norm_is_that_of_the_whole_model(results):
    assert [each[:2] for each in results] == [(True, True)] * 3


def test_a_schedule_without_a_flush_is_refused(results):
    message = "max_norm must be None with a schedule that does not flush, got 0.05: no stage ever"
    assert all(message in each[2] for each in results)
