"""Batches as callers give them: other ones on each rank, and memory that is written to after."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pyparallel.comm import DisagreementError
from pyparallel.pipeline import (
    Interlocking,
    LinearHead,
    OneForwardOneBackward,
    PipelineTrainer,
    PipeOptim,
)
from pyparallel.pipeline.runtime.batch_digest import BatchDigest
from tests.cases import slow
from tests.pipeline.every_schedule import EVERY_SCHEDULE, STREAMING, one_of_each_kind

FEATURES, CLASSES = 6, 3
HEADS = Interlocking(1, heads=LinearHead(CLASSES))
OTHER_VALUES = (
    "rank 1{}: target must be of the same batch on all ranks, got other values than on the rank of "
    "the first stage: draw batches alike on all ranks (seed loaders, samplers and collators alike; "
    "no DistributedSampler within a pipeline), or pass target only on the ranks that read it"
)


def trainer_of(schedule, **options):
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)]
    return PipelineTrainer(
        layers, cross_entropy, lambda p: torch.optim.SGD(p, lr=0.2), schedule,
        num_microbatches=4, split=[2], **options,
    )  # fmt: skip


def batch(seed, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(16, FEATURES, generator=draw, dtype=dtype)
    return x, torch.randint(CLASSES, (16,), generator=draw)


def weights(trainer):
    return [p.detach().clone() for s in trainer.stages for p in s.module.parameters()]


def errors_of(*calls):
    errors = []
    for call in calls:
        try:
            call()
        except DisagreementError as error:
            errors.append(str(error))
    return errors


def give_own_batches(rank, schedules):
    """Return by schedule the errors of own batches, and whether others then train as if alone."""
    found = []
    for schedule in schedules:
        trainer, plain = trainer_of(schedule), trainer_of(schedule)
        x, y = batch(0)
        own = batch(rank)
        # Where a schedule never flushes, the update may be skipped in the flush.
        evaluate, step = partial(trainer.evaluate, *own), partial(trainer.step, *own)
        errors = errors_of(evaluate, step, trainer.flush)
        reads = rank == 1 or schedule == HEADS
        trainer.step(own[0] if rank else x, target=y)  # augmented where it is not read
        trainer.step(x, target=y if reads else None)
        trainer.step(x, target=y if reads else y.double())
        trainer.flush()
        plain.evaluate(x, y)
        for _ in range(3):
            plain.step(x, target=y)
        plain.flush()
        found.append((errors, all(map(torch.equal, weights(trainer), weights(plain)))))
    return found


def test_batches_of_each_ranks_own_are_one_error_and_training_goes_on(ranks, subtests):
    schedules = [OneForwardOneBackward(), PipeOptim(), HEADS]
    found = ranks.run(2, give_own_batches, schedules)
    for schedule, of_ranks in zip(schedules, zip(*found, strict=True), strict=True):
        with subtests.test(str(schedule)):
            expected = [OTHER_VALUES.format(place) for place in ("", ", step 0")]
            if schedule == HEADS:  # the first stage learns from the first rank's target alone
                assert of_ranks == ((expected[:1], False), (expected, False))
            else:
                assert of_ranks == ((expected, True), (expected, True))


def digest(batch):
    return BatchDigest(batch)


@pytest.mark.parametrize(
    "draw",
    [
        lambda draw: torch.randint(10, (64,), generator=draw),
        lambda draw: torch.randn(32, 64, 64, generator=draw),
        lambda draw: torch.rand(16, 1, generator=draw) > 0.5,
        lambda draw: {"labels": torch.randint(5, (16, 9), generator=draw), "length": 9},
        lambda draw: torch.where(  # masks of a collator over one batch
            torch.rand(16, 128, generator=draw) < 0.15, torch.arange(128), -100
        ),
        lambda draw: torch.arange(64)[torch.randperm(64, generator=draw)],  # an order of samples
    ],
)
def test_other_batches_differ_and_rounded_ones_do_not(draw):
    batches = [draw(torch.Generator().manual_seed(seed)) for seed in range(200)]
    values = [digest(each).value for each in batches]
    first = digest(batches[0])
    assert not first.differs_from(values[0])
    assert (
        sum(first.differs_from(value) for value in values[1:]) >= 190
    )  # another step finds others
    if isinstance(batches[0], torch.Tensor) and batches[0].is_floating_point():
        assert not first.differs_from(digest(batches[0].bfloat16()).value)


def test_what_is_not_known_does_not_differ():
    x = torch.arange(4.0)
    for one, other in ((x, None), (None, x), (x, x * torch.nan), (x[:0], x)):
        assert not digest(one).differs_from(digest(other).value)
    on_device = torch.empty(4, device="meta")
    assert BatchDigest(on_device).value == 0.0


class TwoInputs(nn.Linear):
    """A first layer whose inputs, and what it keeps for its backward, are the caller's memory."""

    def forward(self, x, scale=None):
        out = super().forward(x)
        return out if scale is None else out * scale


def train(schedule, *, reuse, form):
    torch.manual_seed(0)
    layers = [TwoInputs(FEATURES, 8), nn.Flatten(), nn.Linear(8, CLASSES)]
    trainer = PipelineTrainer(
        layers, nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), schedule,
        num_microbatches=4, split=[1],
    )  # fmt: skip
    draw = np.random.default_rng(0)
    shapes = (8, FEATURES), (8, 8), (8, CLASSES)
    memory = [np.zeros(shape, np.float32) for shape in shapes]
    for _ in range(5):
        drawn = [draw.standard_normal(shape, dtype=np.float32) for shape in shapes]
        if reuse:  # as loaders do that own the memory of their batches
            for kept, new in zip(memory, drawn, strict=True):
                kept[:] = new
        x, scale, y = map(torch.from_numpy, memory if reuse else drawn)
        if form == "whole":
            trainer.step(x, scale, target=y)
        else:
            args = [*zip(x.chunk(4), scale.chunk(4), strict=True)]
            trainer.step(arg_mbs=args, target_mbs=[*y.chunk(4)])
    trainer.flush()
    return weights(trainer)


@pytest.mark.parametrize(
    ("schedules", "form"),
    [
        (one_of_each_kind(STREAMING), "whole"),
        slow([*EVERY_SCHEDULE, HEADS], "whole"),
        slow([*EVERY_SCHEDULE, HEADS], "microbatches"),
    ],
)
def test_a_batch_is_the_callers_again_after_the_step(schedules, form):
    for schedule in schedules:
        kept, fresh = (train(schedule, reuse=reuse, form=form) for reuse in (True, False))
        assert all(map(torch.equal, kept, fresh)), schedule
