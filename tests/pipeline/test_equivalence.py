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
    GPipe,
    Layout,
    OneForwardOneBackward,
    PipeDream,
    PipelineTrainer,
    PipeMare,
    PipeOptim,
    Schedule,
    SpecTrain,
    XPipe,
)
from tests.pipeline import reference
from tests.pipeline.foresights import AHEAD, Counting, Multiples, Oracle
from tests.pipeline.models import (
    OPTIMIZERS,
    SPLITS,
    Shift,
    build_calls,
    build_layers,
    build_watched_layers,
)
from tests.pipeline.reference import microbatches_per_update, reads, train_plainly
from tests.pipeline.schedules import EVERY_SCHEDULE, FLUSHING, STREAMING, run
from tests.workers import run_ranks

SIZES = [(1, 1), (2, 2), (4, 4), (4, 2)]  # stages, ranks
PREDICTING = (PipeOptim, SpecTrain, XPipe)


@dataclass(frozen=True)
class Case:
    """One training, flushed after three calls and again after two; batches need not be even."""

    schedule: Schedule
    optimizer: str
    dtype: torch.dtype
    num_microbatches: int = 4

    @property
    def streams(self):
        large, small = (build_calls(3, samples, self.dtype) for samples in (13, 12))
        return [large, small[:2]]

    def __str__(self):
        return f"{self.schedule}, {self.optimizer}, {self.dtype}, {self.num_microbatches}"


CASES = [
    *(Case(schedule, "momentum", torch.float64) for schedule in EVERY_SCHEDULE),
    *(Case(schedule, "momentum", torch.float32) for schedule in EVERY_SCHEDULE),
    *(Case(schedule, "AdamW", torch.float64) for schedule in EVERY_SCHEDULE),
    *(
        Case(schedule, "momentum", torch.float64, num_microbatches=2)
        for schedule in (PipeDream(), SpecTrain(1), XPipe("live"), PipeOptim("live"))
    ),
]


@dataclass
class Trained:
    """What one rank has come to: by call, and by stage."""

    losses: list[float | None] = field(default_factory=list)
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)


def train(
    schedule: Schedule,
    layers: Sequence[nn.Module],
    split: Sequence[int],
    optimizer_fn: Callable[[list[nn.Parameter]], Optimizer],
    streams: Sequence[Sequence[tuple[Tensor, Tensor]]],
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
        done.states[stage.index] = {name: value.clone() for name, value in state.items()}
        done.copies[stage.index] = copies
    return done


def train_case(case: Case, num_stages: int) -> Trained:
    return train(
        case.schedule,
        build_layers(case.dtype),
        SPLITS[num_stages],
        OPTIMIZERS[case.optimizer],
        case.streams,
        case.num_microbatches,
    )


def rest(schedule: Schedule, num_stages: int) -> Trained:
    """With a learning rate of 0, but with momentum to predict by."""
    streams, optimizer_fn = [build_calls(3, 12), build_calls(1, 12)], OPTIMIZERS["resting"]
    return train(schedule, build_layers(), SPLITS[num_stages], optimizer_fn, streams)


def watch(schedule: Schedule, num_stages: int) -> list[tuple[list[float], list[float]]]:
    """What the forwards and the backwards of each layer have read."""
    layers = build_watched_layers(num_stages)
    split = range(4, 4 * num_stages, 4)
    if isinstance(schedule, PREDICTING):
        schedule = replace(schedule, prediction=Multiples())
    train(schedule, layers, split, Counting, [build_calls(3, 8, outputs=6)])
    return [(layer.forwards, layer.backwards) for layer in layers]


def train_foretold(schedule: Schedule, num_stages: int) -> Trained:
    truth = train_sequentially(schedule)
    schedule = replace(schedule, prediction=Oracle(all_versions(truth)))
    streams, optimizer_fn = [build_calls(3, 12)] * 2, OPTIMIZERS["momentum"]
    return train(schedule, build_layers(), SPLITS[num_stages], optimizer_fn, streams)


def train_sequentially(schedule: Schedule) -> reference.Trained:
    """Without a pipe, but with as many updates."""
    alone = PipeMare() if microbatches_per_update(schedule, 4) == 1 else GPipe()
    streams, optimizer_fn = [build_calls(3, 12)] * 2, OPTIMIZERS["momentum"]
    return reference.train_in_one_process(
        build_layers, [], mse_loss, optimizer_fn, alone, streams, 4
    )


def all_versions(done: reference.Trained) -> list[list[Tensor]]:
    (stage,) = done.stages
    return [list(version.weights().values()) for version in [*stage.past, *stage.history]]


def roll_downhill(schedule: Schedule, num_stages: int) -> Trained:
    """On a quadratic, with a momentum and a learning rate that stale gradients do not bear."""
    layers = [Shift(feature) for feature in range(num_stages)]
    zeros = torch.zeros(4, num_stages, dtype=torch.float64)
    optimizer_fn = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return train(schedule, layers, range(1, num_stages), optimizer_fn, [[(zeros, zeros)] * 40])


WATCHED = [GPipe(), OneForwardOneBackward(), *STREAMING]
FORETOLD = [
    PipeOptim("consistent"),
    PipeOptim("live"),
    SpecTrain(variant=2),
    XPipe("consistent"),
    XPipe("live"),
]
ROLLING = [PipeMare(), PipeOptim("live"), PipeOptim("consistent")]
JOBS = [
    *((train_case, case) for case in CASES),
    *((rest, schedule) for schedule in EVERY_SCHEDULE),
    *((watch, schedule) for schedule in WATCHED),
    *((train_foretold, schedule) for schedule in FORETOLD),
    *((roll_downhill, schedule) for schedule in ROLLING),
]


def work(rank: int, num_stages: int) -> list:
    return [job(what, num_stages) for job, what in JOBS]


@dataclass(frozen=True)
class Ranks:
    """What every rank has returned, for every job."""

    num_stages: int
    num_ranks: int
    results: list[list]

    def of(self, job: Callable, what: Case | Schedule) -> list:
        return [result[JOBS.index((job, what))] for result in self.results]

    def whole(self, job: Callable, what: Case | Schedule) -> Trained:
        """Of all ranks together: all stages, and the last one's losses."""
        ranks = self.of(job, what)
        last = ranks[(self.num_stages - 1) % self.num_ranks]
        assert all(rank is last or rank.losses == [None] * len(last.losses) for rank in ranks), (
            "only the last stage's rank knows the loss"
        )
        together = Trained(last.losses)
        for rank in ranks:
            together.states.update(rank.states)
            together.copies.update(rank.copies)
        assert sorted(together.states) == list(range(self.num_stages))
        return together

    def values(self, job: Callable, what: Case | Schedule) -> list[Tensor]:
        """Weights and buffers in the order of stages."""
        states = self.whole(job, what).states
        return [value for stage in sorted(states) for value in states[stage].values()]


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: "{}-stages-{}-ranks".format(*size))
def ranks(request):
    num_stages, num_ranks = request.param
    return Ranks(num_stages, num_ranks, run_ranks(num_ranks, work, num_stages, time_limit=60))


@cache
def expected(case: Case, num_stages: int) -> reference.Trained:
    return reference.train_in_one_process(
        partial(build_layers, case.dtype),
        SPLITS[num_stages],
        mse_loss,
        OPTIMIZERS[case.optimizer],
        case.schedule,
        case.streams,
        case.num_microbatches,
    )


def values(states: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    return [value for state in states for value in state.values()]


def assert_same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other), (one - other).abs().max()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_schedule_trains_as_its_reference_does(ranks, case):
    found, wanted = ranks.whole(train_case, case), expected(case, ranks.num_stages)
    exact = case.dtype == torch.float32 and not isinstance(case.schedule, PREDICTING)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}[case.dtype]
    rtol, atol = (0, 0) if exact else (tolerance, tolerance)
    weights = ranks.values(train_case, case), values(wanted.states)
    torch.testing.assert_close(*weights, rtol=rtol, atol=atol)
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_stage_or_a_flush_is_torchs_own_loop_bit_for_bit(ranks, case):
    if ranks.num_stages > 1 and case.schedule not in FLUSHING:
        pytest.skip("stale")
    model = train_plainly(
        partial(build_layers, case.dtype),
        mse_loss,
        OPTIMIZERS[case.optimizer],
        case.streams,
        case.num_microbatches,
        update_each=microbatches_per_update(case.schedule, case.num_microbatches) == 1,
    )
    assert_same(ranks.values(train_case, case), list(model.state_dict().values()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_batch_norm_counts_every_microbatch_once(ranks, case):
    states = ranks.whole(train_case, case).states
    counts = [
        value.item()
        for state in states.values()
        for name, value in state.items()
        if name.endswith("num_batches_tracked")
    ]
    assert counts == [5 * case.num_microbatches]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_many_copies_of_the_weights_as_the_simulator_says(ranks, case):
    layout = Layout(ranks.num_stages, case.num_microbatches, ranks.num_ranks)
    foreseen = run(case.schedule, layout, calls=3).weights.copies.tolist()
    found = ranks.whole(train_case, case).copies
    assert [found[stage] for stage in range(ranks.num_stages)] == foreseen


@pytest.mark.parametrize(
    ("schedule", "copies"),
    [
        ("GPipe", [1, 1, 1, 1]),
        ("PipeDream", [4, 3, 2, 1]),
        ("PipeDream2BW", [2, 2, 2, 2]),
        ("PipeOptim(weights='live')", [2, 2, 2, 1]),
        ("PipeMare", [1, 1, 1, 1]),
    ],
)
def test_copies_of_the_papers(ranks, schedule, copies):
    if ranks.num_stages < 4:
        pytest.skip("the depth of the table")
    (case,) = (each for each in CASES[: len(EVERY_SCHEDULE)] if f"{each}".startswith(f"{schedule}"))
    found = ranks.whole(train_case, case).copies
    assert [found[stage] for stage in range(4)] == copies


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE, ids=repr)
def test_where_nothing_moves_every_schedule_is_the_same(ranks, schedule):
    found = ranks.whole(rest, schedule)
    assert found.losses == ranks.whole(rest, GPipe()).losses
    first = [state for layer in build_layers() for state in layer.state_dict().items()]
    for (name, before), after in zip(first, ranks.values(rest, schedule), strict=True):
        assert torch.equal(before, after) != name.startswith(("running", "num_batches"))


@pytest.mark.parametrize("schedule", WATCHED, ids=repr)
def test_every_layer_of_a_stage_reads_the_version_it_should(ranks, schedule):
    results = ranks.of(watch, schedule)
    for layer in range(4 * ranks.num_stages):
        stage = layer // 4
        rules = [
            reads(schedule, microbatch, stage, ranks.num_stages, 4) for microbatch in range(12)
        ]
        for found, wanted in zip(
            results[stage % ranks.num_ranks][layer], zip(*rules, strict=True), strict=True
        ):
            multiples = [1 + read.version + AHEAD * read.horizon for read in wanted]
            assert found == pytest.approx(multiples, rel=1e-9), layer


@pytest.mark.parametrize("schedule", FORETOLD, ids=repr)
def test_true_predictions_make_it_sequential_training(ranks, schedule):
    found, truth = ranks.whole(train_foretold, schedule), train_sequentially(schedule)
    assert found.losses == pytest.approx(truth.losses, rel=1e-15)
    assert_same(ranks.values(train_foretold, schedule), values(truth.states))


def test_prediction_bears_what_naive_asynchrony_does_not(ranks):
    if ranks.num_stages < 4:
        pytest.skip("bears it too")
    naive, *predicted = (ranks.whole(roll_downhill, schedule).losses for schedule in ROLLING)
    assert naive[-1] > 10 * naive[0]
    for losses in predicted:
        assert losses[-1] < 1e-2 * losses[0]
