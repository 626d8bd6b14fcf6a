"""What a trainer's ranks come to is what the reference comes to in one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from pyparallel.pipeline import (
    Displacement,
    GPipe,
    Layout,
    OneForwardOneBackward,
    PipeDream,
    PipeDream2BW,
    PipelineTrainer,
    PipeMare,
    PipeOptim,
    Rollout,
    Schedule,
    SpecTrain,
    XPipe,
)
from tests.pipeline import reference
from tests.pipeline.models import (
    OPTIMIZERS,
    SPLIT_WITH_BARE_STAGE,
    SPLITS,
    Shift,
    build_calls,
    build_layers,
    build_watched_layers,
)
from tests.pipeline.oracles import AHEAD, Counting, LastStep, Multiples, Oracle
from tests.pipeline.reference import microbatches_per_update, reads, train_plainly
from tests.pipeline.schedules import EVERY_SCHEDULE, FLUSHING, STREAMING, run
from tests.workers import Outcome, observe_ranks

PREDICTING = (PipeOptim, SpecTrain, XPipe)
PREDICTED = [SpecTrain(1), XPipe("live"), PipeOptim("live"), PipeOptim("consistent")]
# All with one prediction, for which any optimizer will do.
SCHEDULES = [
    replace(each, prediction=Displacement()) if isinstance(each, PREDICTING) else each
    for each in EVERY_SCHEDULE
]

Calls = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """One training, flushed after three calls and again after one; batches need not be even."""

    schedule: Schedule
    optimizer: str = "momentum"
    dtype: torch.dtype = torch.float64
    num_microbatches: int = 4
    bare_stage: bool = False

    @property
    def streams(self) -> list[Calls]:
        large, small = (build_calls(3, samples, self.dtype) for samples in (13, 12))
        return [large, small[:1]]

    def split(self, num_stages: int) -> list[int]:
        return SPLIT_WITH_BARE_STAGE if self.bare_stage else SPLITS[num_stages]

    def __str__(self):
        return "-".join(str(value) for value in vars(self).values())


@dataclass
class Trained:
    """What one rank has come to, or all of them: by call, by name and by stage."""

    losses: list[float | None] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)


def train(
    schedule: Schedule,
    layers: Sequence[nn.Module],
    split: Sequence[int],
    optimizer_fn: Callable[[list[nn.Parameter]], Optimizer],
    streams: Sequence[Calls],
    num_microbatches: int = 4,
) -> Trained:
    trainer = PipelineTrainer(
        layers, mse_loss, optimizer_fn, schedule, num_microbatches=num_microbatches, split=split
    )
    done = Trained()
    for calls in streams:
        done.losses += [trainer.step(*call) for call in calls]
        trainer.flush()
    for stage, copies in zip(trainer.stages, trainer.peak_weight_copies, strict=True):
        state = stage.module.state_dict()
        done.state.update((name, value.clone()) for name, value in state.items())
        done.copies[stage.index] = copies
    return done


def train_case(case: Case, num_stages: int) -> Trained:
    schedule = case.schedule
    if isinstance(schedule, PREDICTING) and case.dtype == torch.float64:
        schedule = replace(schedule, prediction=Displacement(LastStep()))  # not of the ops' dtypes
    return train(
        schedule,
        build_layers(case.dtype),
        case.split(num_stages),
        OPTIMIZERS[case.optimizer],
        case.streams,
        case.num_microbatches,
    )


def rest(schedule: Schedule, num_stages: int) -> Trained:
    """With a learning rate of 0, but with momentum to predict by."""
    layers, streams = build_layers(torch.float32), [build_calls(2, 12, torch.float32)]
    return train(schedule, layers, SPLITS[num_stages], OPTIMIZERS["resting"], streams)


def watch(schedule: Schedule, num_stages: int) -> list[tuple[list[float], list[float]]]:
    """What the forwards and the backwards of each layer have read."""
    layers = build_watched_layers(num_stages)
    split = range(4, 4 * num_stages, 4)
    if isinstance(schedule, PREDICTING):
        schedule = replace(schedule, prediction=Multiples())
    train(schedule, layers, split, Counting, [build_calls(3, 8, outputs=6)])
    return [(layer.forwards, layer.backwards) for layer in layers]


TWICE = [build_calls(3, 12), build_calls(1, 12)]


def train_foretold(schedule: Schedule, num_stages: int) -> Trained:
    truth = train_sequentially(schedule)
    schedule = replace(schedule, prediction=Oracle(all_versions(truth)))
    layers, split, optimizer_fn = build_layers(), SPLITS[num_stages], OPTIMIZERS["momentum"]
    return train(schedule, layers, split, optimizer_fn, TWICE)


def train_sequentially(schedule: Schedule) -> reference.Trained:
    """Without a pipe, but with as many updates."""
    alone = PipeMare() if microbatches_per_update(schedule, 4) == 1 else GPipe()
    return reference.train_in_one_process(
        build_layers, [], mse_loss, OPTIMIZERS["momentum"], alone, TWICE, 4
    )


def all_versions(done: reference.Trained) -> list[list[Tensor]]:
    (stage,) = done.stages
    return [list(version.weights().values()) for version in [*stage.past, *stage.history]]


def roll_downhill(schedule: Schedule, num_stages: int) -> Trained:
    """On a quadratic, with a momentum and a learning rate that stale gradients do not bear."""
    layers = [Shift(feature) for feature in range(num_stages)]
    zeros = torch.zeros(4, num_stages, dtype=torch.float64)
    optimizer_fn = partial(torch.optim.SGD, lr=0.12, momentum=0.9)
    return train(schedule, layers, range(1, num_stages), optimizer_fn, [[(zeros, zeros)] * 25])


CASES = [Case(schedule) for schedule in SCHEDULES]
MORE_CASES = [
    *(replace(case, dtype=torch.float32) for case in CASES),
    *(replace(case, optimizer="AdamW") for case in CASES),
]
ODD_CASES = [
    *(Case(schedule, "groups") for schedule in (GPipe(), PipeDream(), *PREDICTED)),
    *(Case(schedule, num_microbatches=2) for schedule in (PipeDream(), *PREDICTED)),
    *(Case(schedule, bare_stage=True) for schedule in (GPipe(), PipeDream(), *PREDICTED)),
    Case(PipeOptim("live", Rollout(0.5)), dtype=torch.float32),
]
WATCHED = [GPipe(), OneForwardOneBackward(), *STREAMING]
FORETOLD = [
    PipeOptim("consistent"),
    PipeOptim("live"),
    SpecTrain(variant=2),
    XPipe("consistent"),
    XPipe("live"),
]
ROLLING = [PipeMare(), PipeOptim("live", Displacement(LastStep()))]

Size = tuple[int, int]  # stages, ranks
DEEP = (4, 4)
CASES_OF = {
    (1, 1): [*CASES, *MORE_CASES],
    (2, 2): CASES,
    (4, 2): CASES,
    DEEP: [*CASES, *MORE_CASES, *ODD_CASES],
}
JOBS = {size: [(train_case, case) for case in cases] for size, cases in CASES_OF.items()}
JOBS[DEEP] += [
    *((rest, schedule) for schedule in EVERY_SCHEDULE),
    *((watch, schedule) for schedule in WATCHED),
    *((train_foretold, schedule) for schedule in FORETOLD),
    *((roll_downhill, schedule) for schedule in ROLLING),
]
EVERY_CASE = pytest.mark.parametrize(
    ("size", "case"),
    [
        pytest.param(size, case, id="{}-stages-{}-ranks-{}".format(*size, case))
        for size, cases in CASES_OF.items()
        for case in cases
    ],
)


def work(rank: int, size: Size) -> list:
    return [job(what, size[0]) for job, what in JOBS[size]]


@cache
def outcomes(size: Size) -> list[Outcome]:
    """Of one set of processes for all tests; what failed has failed for all of them."""
    return observe_ranks(size[1], work, size, time_limit=60)


def of_ranks(size: Size, job: Callable, what: Case | Schedule) -> list:
    """What a job has returned on each rank."""
    assert [outcome.error for outcome in outcomes(size)] == [None] * size[1], outcomes(size)
    return [outcome.value[JOBS[size].index((job, what))] for outcome in outcomes(size)]


def of_pipe(size: Size, job: Callable, what: Case | Schedule) -> Trained:
    """What all ranks together have trained, and the losses of the last stage's."""
    ranks = of_ranks(size, job, what)
    last = ranks[(size[0] - 1) % size[1]]
    whole = Trained(last.losses)
    for rank in ranks:
        assert rank is last or rank.losses == [None] * len(last.losses)
        whole.state.update(rank.state)
        whole.copies.update(rank.copies)
    return whole


@cache
def expected(case: Case, num_stages: int) -> reference.Trained:
    return reference.train_in_one_process(
        partial(build_layers, case.dtype),
        case.split(num_stages),
        mse_loss,
        OPTIMIZERS[case.optimizer],
        case.schedule,
        case.streams,
        case.num_microbatches,
        foreseen_by(case.schedule),
    )


def foreseen_by(schedule: Schedule) -> reference.Prediction:
    if isinstance(schedule.prediction, Rollout):
        return partial(reference.roll_out, schedule.prediction.persistence)
    return reference.predict


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@EVERY_CASE
def test_every_schedule_trains_as_its_reference_does(size, case):
    found, wanted = of_pipe(size, train_case, case), expected(case, size[0])
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}[case.dtype]
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
    if case.dtype == torch.float32 and not isinstance(case.schedule, PREDICTING):
        assert_same(found.state, wanted.state)
    else:
        torch.testing.assert_close(found.state, wanted.state, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("size", "case"),
    [
        *(((1, 1), case) for case in CASES_OF[1, 1]),
        *((DEEP, case) for case in CASES_OF[DEEP] if case.schedule in FLUSHING),
    ],
    ids=str,
)
def test_one_stage_or_a_flush_is_torchs_own_loop_bit_for_bit(size, case):
    model = train_plainly(
        partial(build_layers, case.dtype),
        mse_loss,
        OPTIMIZERS[case.optimizer],
        case.streams,
        case.num_microbatches,
        update_each=microbatches_per_update(case.schedule, case.num_microbatches) == 1,
    )
    assert_same(of_pipe(size, train_case, case).state, model.state_dict())


@EVERY_CASE
def test_batch_norm_counts_every_microbatch_once(size, case):
    state = of_pipe(size, train_case, case).state
    assert state["4.num_batches_tracked"] == 4 * case.num_microbatches


@EVERY_CASE
def test_as_many_copies_of_the_weights_as_the_simulator_says(size, case):
    layout = Layout(size[0], case.num_microbatches, size[1])
    copies = run(case.schedule, layout, calls=3).weights.copies.tolist()
    if case.bare_stage:
        copies[1] = 1  # of nothing
    assert of_pipe(size, train_case, case).copies == dict(enumerate(copies))


@pytest.mark.parametrize(
    ("schedule", "copies"),
    [
        (GPipe(), [1, 1, 1, 1]),
        (PipeMare(), [1, 1, 1, 1]),
        (PipeDream(), [4, 3, 2, 1]),
        (PipeDream2BW(), [2, 2, 2, 2]),
        (PipeOptim("live"), [2, 2, 2, 1]),
    ],
    ids=repr,
)
def test_copies_of_the_papers(schedule, copies):
    assert of_pipe(DEEP, train_case, Case(schedule)).copies == dict(enumerate(copies))


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE, ids=repr)
def test_where_nothing_moves_every_schedule_is_the_same(schedule):
    found = of_pipe(DEEP, rest, schedule)
    assert found.losses == of_pipe(DEEP, rest, GPipe()).losses
    first = nn.Sequential(*build_layers(torch.float32)).state_dict()
    changed = {name for name, value in first.items() if not torch.equal(value, found.state[name])}
    assert changed == {"4.running_mean", "4.running_var", "4.num_batches_tracked"}


@pytest.mark.parametrize("schedule", WATCHED, ids=repr)
def test_every_layer_of_a_stage_reads_the_version_it_should(schedule):
    ranks, (num_stages, num_ranks) = of_ranks(DEEP, watch, schedule), DEEP
    for layer in range(4 * num_stages):
        stage = layer // 4
        rules = [reads(schedule, m, stage, num_stages, num_microbatches=4) for m in range(12)]
        passes = ranks[stage % num_ranks][layer]
        for found, wanted in zip(passes, zip(*rules, strict=True), strict=True):
            multiples = [1 + read.version + AHEAD * read.horizon for read in wanted]
            assert found == pytest.approx(multiples, rel=1e-9), layer


@pytest.mark.parametrize("schedule", FORETOLD, ids=repr)
def test_true_predictions_make_it_sequential_training(schedule):
    found, truth = of_pipe(DEEP, train_foretold, schedule), train_sequentially(schedule)
    assert found.losses == pytest.approx(truth.losses, rel=1e-15)
    assert_same(found.state, truth.state)


def test_prediction_bears_what_naive_asynchrony_does_not():
    naive, predicted = (of_pipe(DEEP, roll_downhill, schedule).losses for schedule in ROLLING)
    assert naive[-1] > 10 * naive[0]
    assert predicted[-1] < 0.1 * predicted[0]
