"""Random numbers of stages are their own: the caller's generators stay as they were."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from pyparallel.pipeline import (
    GPipe,
    Interlocking,
    LinearHead,
    OneForwardOneBackward,
    PipeDream2BW,
    PipelineTrainer,
    PipeOptim,
)
from pyparallel.pipeline.runtime.generators import StageGenerators
from pyparallel.pipeline.schedules.action import Action, Kind
from tests.pipeline.every_schedule import FLUSHING, STREAMING, one_of_each_kind

FEATURES, CLASSES = 6, 3


class Recomputed(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return checkpoint(self.module, x, use_reentrant=False)


class Masked(nn.Module):
    """Dropout with masks drawn in training, which are kept, or given masks, one after the other."""

    def __init__(self, given=()):
        super().__init__()
        self.given, self.drawn = list(given), []

    def forward(self, x):
        if not self.training:
            return x
        mask = self.given.pop(0) if self.given else nn.functional.dropout(torch.ones_like(x))
        self.drawn.append(mask)
        return x * mask


def build(dropout=lambda stage: nn.Dropout(0.3)):
    """Return two blocks with dropout, of which the second ends in classes."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), dropout(0)).double(),
        nn.Sequential(nn.Linear(FEATURES, 8), dropout(1), nn.Linear(8, CLASSES)).double(),
    ]


def trainer_of(schedule, layers=None, seed=0):
    layers = build() if layers is None else layers
    torch.manual_seed(seed)
    return PipelineTrainer(
        layers, cross_entropy, lambda p: torch.optim.SGD(p, lr=0.2), schedule,
        num_microbatches=4, split=[1],
    )  # fmt: skip


def batch(number):
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(8, FEATURES, dtype=torch.float64, generator=draw)
    return x, torch.randint(CLASSES, (8,), generator=draw)


def weights(trainer):
    stages = {stage.index: stage.module for stage in trainer.stages}
    return {i: [p.detach().clone() for p in stage.parameters()] for i, stage in stages.items()}


def calls_of(trainer):
    yield "prepare", lambda: trainer.prepare(*batch(0))
    for number in range(3):
        yield f"step {number}", lambda number=number: trainer.step(*batch(number))
    yield "evaluate", lambda: trainer.evaluate(*batch(0))
    yield "predict", lambda: trainer.predict(batch(0)[0])
    yield "step 3", lambda: trainer.step(*batch(3))
    yield "flush", trainer.flush


def train(rank, schedules):
    """Return by schedule: which calls have moved torch's generator, and the weights of stages."""
    found = []
    for schedule in schedules:
        trainer, moved = trainer_of(schedule), []
        for name, call in calls_of(trainer):
            before = torch.get_rng_state()
            call()
            if not torch.equal(torch.get_rng_state(), before):
                moved.append(name)
        found.append((moved, weights(trainer)))
    return found


HEADS = Interlocking(1, heads=LinearHead(CLASSES))


@pytest.mark.parametrize(
    "schedules",
    [
        [OneForwardOneBackward(), PipeOptim(), HEADS],
        pytest.param([*FLUSHING[1:], *one_of_each_kind(STREAMING)], marks=pytest.mark.slow),
    ],
)
def test_calls_leave_the_generators_and_ranks_train_as_one_process(ranks, subtests, schedules):
    schedules = [each for each in schedules if type(each).__name__ not in ("Interleaved",)]
    found, alone = ranks.run(2, train, schedules), train(0, schedules)
    for number, schedule in enumerate(schedules):
        with subtests.test(str(schedule)):
            _, expected = alone[number]
            for rank in (0, 1):
                moved, own = found[rank][number]
                assert not moved
                assert all(map(torch.equal, own[rank], expected[rank]))


def test_a_step_is_that_of_torch_with_the_same_masks():
    masked = {}

    def dropout(stage):
        masked[stage] = Masked()
        return masked[stage]

    trainer = trainer_of(GPipe(), build(dropout))
    for number in range(2):
        trainer.step(*batch(number))
    drawn = [masked[stage].drawn for stage in (0, 1)]
    model = nn.Sequential(*build(lambda stage: Masked(drawn[stage])))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for number in range(2):
        optimizer.zero_grad()
        for x, y in zip(*(each.chunk(4) for each in batch(number)), strict=True):
            (cross_entropy(model(x), y) / 4).backward()
        optimizer.step()
    for ours, torchs in zip(weights(trainer).values(), model, strict=True):
        torch.testing.assert_close(ours, list(torchs.parameters()), rtol=0, atol=1e-12)
    flat = [tuple(mask.flatten().tolist()) for masks in drawn for mask in masks]
    assert len(set(flat)) == len(flat) == 16


def test_flushing_schedules_and_recomputation_have_the_same_dropout():
    found = []
    for schedule in [GPipe(), OneForwardOneBackward(), *FLUSHING]:
        for recomputed in (False, True):
            layers = [Recomputed(each) for each in build()] if recomputed else build()
            trainer = trainer_of(schedule, layers)
            losses = [trainer.step(*batch(number)) for number in range(3)]
            found.append(losses)
    torch.testing.assert_close(found, [found[0]] * len(found), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "schedule", [OneForwardOneBackward(), PipeOptim(), PipeDream2BW()], ids=str
)
def test_a_run_with_dropout_resumes_bit_for_bit_under_another_seed(schedule, tmp_path):
    trainer, evaluates = trainer_of(schedule), trainer_of(schedule)
    others = [trainer_of(schedule, seed=7) for _ in range(2)]
    for number in range(2):
        trainer.step(*batch(number))
        evaluates.step(*batch(number))
        if number == 0:  # draws of no step
            evaluates.flush()
            trainer.flush()
            evaluates.predict(batch(5)[0])
    trainer.flush()
    evaluates.flush()
    others[0].load_state_dict(copy.deepcopy(trainer.state_dict()))
    with pytest.warns(UserWarning, match="in a single process"):
        dcp.save(trainer.sharded_state_dict(), checkpoint_id=tmp_path)
    others[1].load_checkpoint(tmp_path)
    torch.rand(3)  # of the caller
    losses = [[each.step(*batch(k)) for k in (2, 3)] for each in (trainer, evaluates, *others)]
    assert losses == [losses[0]] * 4
    reseeded = trainer_of(schedule, seed=7)
    reseeded.step(*batch(0))
    assert reseeded.step(*batch(1)) != losses[0]


def test_every_forward_has_random_numbers_of_its_own():
    drawn = []
    for replica, step, trains in ((None, 0, True), (0, 0, True), (1, 0, True), (0, 1, True),
                                  (0, 1, False), (0, 1, False)):  # fmt: skip
        generators = StageGenerators(3, replica, [])
        for _ in range(1 + (not trains)):  # a second evaluation draws others
            with generators.of_call(step, trains=trains):
                drawn.append(torch.rand(4))
                for kind in (Kind.FORWARD, Kind.HEAD):
                    for stage in (0, 1):
                        for microbatch in (0, 1):
                            generators.seed_for(Action(stage, kind, microbatch), 4)
                            drawn.append(torch.rand(4))
    different = {tuple(each.tolist()) for each in drawn}
    assert len(different) == len(drawn) - 2 * 9  # the last two cases are equal
