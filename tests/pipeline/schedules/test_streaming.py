"""Schedules that do not flush: their synchronous start, and which weights 2BW predicts."""

import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from pyparallel.pipeline import (
    Displacement,
    GPipe,
    OneForwardOneBackward,
    PipeDream2BW,
    PipelineShape,
    PipelineTrainer,
    PipeOptim,
)
from pyparallel.pipeline.runtime.build_stage import find_warm_up
from tests.pipeline.every_schedule import STREAMING, run

PREDICTED = PipeDream2BW(prediction=Displacement())
SHAPES = [PipelineShape(*sizes) for sizes in ((1, 2, 1), (2, 3, 2), (4, 4, 2), (4, 8, 4))]


def test_updates_of_a_start_are_those_of_a_flush_and_the_others_those_after_one(subtests):
    """The simulation would end with an error if a rank waited forever."""
    for schedule in (*STREAMING, PREDICTED, replace(PREDICTED, weights="live")):
        for shape in SHAPES:
            every = schedule.microbatches_per_update(shape)
            start = 2 * shape.num_microbatches // every + shape.num_microbatches // every // 2
            with subtests.test(schedule=schedule, shape=shape):
                started = replace(schedule, synchronous_updates=start)
                ranks = range(shape.num_ranks)
                begun = [[*started.rank_actions(shape, rank, 4)] for rank in ranks]
                without = [[*schedule.rank_actions(shape, rank, 4)] for rank in ranks]
                assert [sorted(map(str, each)) for each in begun] == [
                    sorted(map(str, each)) for each in without
                ]
                only = run(started, shape, steps=2)
                assert not only.forward_staleness.any()
                assert not only.forward_horizon.any()
                assert only.weights.copies.max() == 1
                after = run(started, shape, steps=8)
                plain = run(schedule, shape, steps=8)
                for name in ("forward_staleness", "forward_horizon"):
                    assert np.array_equal(getattr(after, name), getattr(plain, name)), name
                assert np.array_equal(after.weights.copies, plain.weights.copies)


def test_the_start_of_2bw_is_1f1b_with_a_flush():
    shape = PipelineShape(4, 6, 4)
    started = PipeDream2BW(synchronous_updates=3)
    for rank in range(4):
        assert [*started.rank_actions(shape, rank, 3)] == [
            *OneForwardOneBackward().rank_actions(shape, rank, 3)
        ]


def test_the_count_goes_on_after_a_flush():
    started = PipeOptim(synchronous_updates=5)
    assert [started.after(done).synchronous_updates for done in (0, 3, 5, 9)] == [5, 2, 0, 0]
    assert GPipe().after(3) == GPipe()


@pytest.mark.parametrize(
    ("scheduler_fn", "updates"),
    [
        (partial(LinearLR, start_factor=0.1, total_iters=7), 7),
        (partial(LambdaLR, lr_lambda=lambda done: min(done + 1, 10 - done)), 4),
        (lambda o: SequentialLR(o, [LinearLR(o, 0.1), CosineAnnealingLR(o, 90)], [5]), 5),
    ],
)
def test_a_warm_up_is_found(scheduler_fn, updates):
    assert find_warm_up(scheduler_fn) == updates
    schedule = PipeOptim(synchronous_updates="warm-up").with_warm_up(lambda: updates)
    assert schedule == PipeOptim(synchronous_updates=updates)


@pytest.mark.slow
def test_what_has_no_warm_up_is_refused():
    for scheduler_fn, sentence in [
        (None, "without a scheduler_fn"),
        (ReduceLROnPlateau, "with this scheduler_fn, got from it TypeError"),
        (partial(LambdaLR, lr_lambda=lambda done: 1.0), "with .* rises in 0 updates"),
        (partial(LambdaLR, lr_lambda=lambda done: 1.0 + done), "with .* rises in 99998 updates"),
    ]:
        with pytest.raises(ValueError, match=f'must be a number, not "warm-up", {sentence}'):
            find_warm_up(scheduler_fn)


def test_mistakes_are_one_sentence():
    for wrong in (-1, 2.5, True):
        with pytest.raises((ValueError, TypeError), match="synchronous_updates must be an integer"):
            PipeOptim(synchronous_updates=wrong)
    with pytest.raises(TypeError, match="synchronous_updates"):
        GPipe(synchronous_updates=3)
    with pytest.raises(ValueError, match="must be a number without a trainer, got 'warm-up'"):
        PipeOptim(synchronous_updates="warm-up").actions(2, 2)
    with pytest.raises(ValueError, match='weights must be "consistent" without a prediction'):
        PipeDream2BW("live")
    assert PREDICTED.error_at(PipelineShape(4, 3, 4)) is None
    assert PREDICTED.error_at(PipelineShape(4, 2, 4)) == (
        "num_microbatches must be at least num_stages - 1 for PipeDream2BW with a prediction, "
        "which is of one update, got 2 for 4 stages"
    )
    assert PipeDream2BW().error_at(PipelineShape(4, 2, 4)) is None


def test_copies_of_2bw_with_a_prediction():
    """Two predictions are read at a time beside the live weights; one if the backward reads those.

    The last stage predicts too, before the update that replaces the version.
    """
    shape = PipelineShape(4, 8, 4)
    assert run(PREDICTED, shape, steps=5).weights.copies.tolist() == [3, 3, 3, 2]
    live = replace(PREDICTED, weights="live")
    assert run(live, shape, steps=5).weights.copies.tolist() == [2, 2, 2, 2]


class SelfAttention(nn.Linear):
    """Attention as far as a trainer can see."""


def train_attention(optimizer_fn, schedule):
    layers = [SelfAttention(2, 2), nn.Linear(2, 2)]
    PipelineTrainer(layers, mse_loss, optimizer_fn, schedule, num_microbatches=2, split=[1])


def test_delayed_attention_under_adam_is_a_warning_that_names_the_options():
    with pytest.warns(UserWarning, match="AdamW on delayed .* synchronous_updates=100 "):
        train_attention(AdamW, PipeOptim())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_attention(AdamW, PipeOptim(synchronous_updates=3))
        train_attention(AdamW, GPipe())
        train_attention(partial(SGD, lr=0.1), PipeOptim())
