"""PipeMare's corrections: the learning rate of a stage, and the weights a backward reads."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from pyparallel.pipeline import Kind, PipelineShape, PipelineTrainer, PipeMare
from pyparallel.pipeline.runtime.stage_weights import StageWeights
from pyparallel.training import FlatBuckets

FACTORS = [
    (0, [1 / 4, 1 / 4**0.75, 1 / 4**0.5, 1 / 4**0.25, 1, 1]),
    (2, [1 / 2, 1 / 2**0.75, 1 / 2**0.5, 1 / 2**0.25, 1, 1]),
    (3, [1] * 6),
    (4, [1] * 6),
]


def test_the_rate_is_divided_by_a_power_of_the_delay(subtests):
    for stage, factors in FACTORS:
        with subtests.test(stage=stage, factors=factors):
            schedule = PipeMare(annealing=4)
            got = [
                schedule.rate_factor(PipelineShape(5, 8, 5), stage, update) for update in range(6)
            ]
            assert got == pytest.approx(factors)


def test_without_annealing_rates_do_not_change():
    assert PipeMare().rate_factor(PipelineShape(5, 8, 5), 0, 0) == 1


class Shift(nn.Module):
    """Adds a parameter, whose gradient does not depend on the weights."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.zeros(3))

    def forward(self, inputs):
        return inputs + self.by


def test_every_stage_of_a_pipeline_has_its_own_rate():
    schedule, shape = PipeMare(annealing=6), PipelineShape(4, 2, 1)
    layers = [Shift() for _ in range(4)]
    trainer = PipelineTrainer(
        layers,
        lambda output, target: (output * target).sum(1).mean(),
        partial(SGD, lr=0.5),
        schedule,
        num_microbatches=2,
        split=[1, 2, 3],
    )
    for _ in range(5):
        trainer.step(torch.zeros(2, 3), torch.ones(2, 3))
    trainer.flush()
    for stage, layer in enumerate(layers):
        rates = [schedule.rate_factor(shape, stage, update) for update in range(10)]
        torch.testing.assert_close(layer.by.detach(), torch.full((3,), -0.5 * sum(rates)))


def test_backwards_read_the_weights_of_their_forwards_for_constant_changes(subtests):
    for make in [partial(SGD, lr=0.1), partial(Adam, lr=0.1)]:
        for stage in [0, 1, 3]:
            with subtests.test(make=make, stage=stage):
                schedule, shape = PipeMare(decay=0.25), PipelineShape(4, 40, 4)
                parameter = nn.Parameter(torch.zeros(5))
                optimizer = make([parameter])
                flat = [FlatBuckets([parameter], 1 << 62)]
                predictor = schedule.weight_predictor(shape, stage, optimizer, flat)
                weights = StageWeights(
                    flat, predictor, schedule.versions(shape), stage, lambda each: each
                )
                read, errors = {}, []
                for action in schedule.rank_actions(shape, stage):
                    if action.kind is Kind.FORWARD:
                        with weights.forward(action.microbatch):
                            read[action.microbatch] = parameter.detach().clone()
                    elif action.kind is Kind.BACKWARD:
                        with weights.backward(action.microbatch):
                            errors.append(
                                (parameter.detach() - read[action.microbatch]).abs().max().item()
                            )
                        weights.end_backward(action.microbatch)
                    else:
                        parameter.grad = torch.ones(5)
                        weights.update()
                assert len(errors) == 40
                assert max(errors[25:]) < 1e-5
                assert (max(errors) > 0.01) == (stage < 3)  # until the average has converged
                assert weights.peak_copies == (2 if stage < 3 else 1)
