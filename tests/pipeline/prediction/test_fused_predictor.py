"""Pipelines with ``pyparallel.optim``: the same training, with predictions out of the step."""

import copy
from itertools import cycle

import pytest
import torch
from torch import nn

from pyparallel import optim
from pyparallel.pipeline import (
    GPipe,
    Nesterov,
    PipeDream,
    PipeDream2BW,
    PipelineTrainer,
    PipeMare,
    PipeOptim,
    SpecTrain,
    XPipe,
)
from tests.ops.op_counter import OpCounter

SCHEDULES = [
    PipeOptim(),
    PipeOptim("consistent"),
    SpecTrain(),
    XPipe(),
    PipeDream(),
    PipeDream2BW(),
    PipeMare(annealing=10, decay=0.2),
    Nesterov(),
    GPipe(),
]
OPTIMIZERS = [
    ("AdamW", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.02, "momentum": 0.9}),
    ("SGD", {"lr": 0.02, "weight_decay": 0.1}),
]


def build(package, schedule, name, options):
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1)]

    def optimizer_fn(parameters):
        groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.005}]
        return getattr(package, name)(groups, **options)

    return PipelineTrainer(
        layers, nn.functional.mse_loss, optimizer_fn, schedule, num_microbatches=4, split=[3]
    )


def batches(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(8, 8, generator=generator)
        yield x, x.sum(1, keepdim=True)


def train(package, schedule, name, options):
    trainer = build(package, schedule, name, options)
    for index, batch in enumerate(batches(6)):
        trainer.step(*batch)
        if index == 3:
            trainer.flush()
            trainer.load_state_dict(copy.deepcopy(trainer.state_dict()))
    trainer.flush()
    return torch.cat([p.detach().flatten() for s in trainer.stages for p in s.module.parameters()])


@pytest.mark.slow
def test_schedules_train_as_with_torchs_optimizers(subtests):
    for schedule, (name, options) in zip(SCHEDULES, cycle(OPTIMIZERS), strict=False):
        with subtests.test(schedule=schedule, optimizer=name):
            ends = [train(package, schedule, name, options) for package in (torch.optim, optim)]
            assert (ends[0] - ends[1]).abs().max() < 3e-6


def count_ops(rank):
    trainer = build(optim, PipeOptim(), "AdamW", {"lr": 0.01})
    first, *rest = batches(4)
    trainer.step(*first)
    with OpCounter() as ops:
        for batch in rest:
            trainer.step(*batch)
    updates = 4 * len(rest)
    trainer.flush()
    return dict(ops.calls), 2 * updates  # two buckets, one for each group


def test_an_update_and_its_prediction_are_one_op_a_bucket(ranks):
    for calls, num_steps in ranks.run(2, count_ops):
        assert calls == {"adamw_step_": num_steps}


def test_predictions_before_the_first_step_and_without_gradients_are_the_weights():
    # With eps = 0 a bias correction of step 0 would be a nan.
    frozen, trained = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(3))
    for optimizer in (optim.AdamW([frozen, trained]), optim.SGD([frozen, trained], momentum=0.9)):
        (weights,) = optimizer.lay_out()
        out = torch.empty_like(weights.buffers[0])
        optimizer.predict_bucket(0, 3, out)
        assert torch.equal(out, weights.buffers[0])
        trained.grad, frozen.grad = torch.ones(3), None
        out.fill_(torch.nan)
        optimizer.adopt(lambda o, out=out: o.step_bucket(0, horizon=3, prediction=out))
        optimizer.step()
        first, second = weights.views([out])
        assert torch.equal(first, frozen)
        assert (second < trained).all()
