"""Trainings on ranks for test_equivalence, several tests' worth for each set of processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from pyparallel.pipeline import (
    Correction,
    Displacement,
    GPipe,
    LastUpdate,
    Nesterov,
    PipeDream,
    PipeDream2BW,
    PipelineTrainer,
    PipeMare,
    PipeOptim,
    Rollout,
    Schedule,
    SpecTrain,
    StageMomentum,
    UpdateErrorFeedback,
    XPipe,
    ZeroBubble,
)
from tests.pipeline import reference
from tests.pipeline.every_schedule import EVERY_SCHEDULE, FLUSHING, STREAMING
from tests.pipeline.models import (
    OPTIMIZERS,
    SPLIT_WITH_BARE_STAGE,
    SPLITS,
    Shift,
    build_calls,
    build_layers,
    build_watched_layers,
    smooth_muon,
)
from tests.pipeline.oracles import Counting, LastStep, Multiples, Oracle
from tests.pipeline.reference import microbatches_per_update
from tests.workers import Outcome, observe_ranks

PREDICTING = (PipeOptim, SpecTrain, XPipe)
PREDICTED = [SpecTrain(1), XPipe("live"), PipeOptim("live"), PipeOptim("consistent")]
# All with one prediction, for which any optimizer will do.
SCHEDULES = [
    replace(each, prediction=Displacement()) if isinstance(each, PREDICTING) else each
    for each in EVERY_SCHEDULE
]
CORRECTED = PipeMare(annealing=10, decay=0.25)  # with an op that takes no float64

Calls = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """One training, flushed after three steps and again after one, on uneven batches."""

    schedule: Schedule
    optimizer: str = "momentum"
    dtype: torch.dtype = torch.float64
    num_microbatches: int = 4
    bare_stage: bool = False
    correction: Correction | None = None
    halving: bool = False  # learning rates, with each update

    @property
    def streams(self) -> list[Calls]:
        large, small = (build_calls(3, samples, self.dtype) for samples in (13, 12))
        return [large, small[:1]]

    @property
    def is_plain(self) -> bool:
        """Return whether no predicted weights are read."""
        return self.schedule != CORRECTED and not isinstance(self.schedule, PREDICTING)

    def split(self, num_stages: int) -> list[int]:
        return SPLIT_WITH_BARE_STAGE if self.bare_stage else SPLITS[num_stages]

    def rates(self, count: int) -> float:
        """Return the learning rates' factor after so many updates."""
        return 0.5**count if self.halving else 1.0

    def __str__(self):
        return "-".join(str(value) for value in vars(self).values())


@dataclass
class Trained:
    """The result of one rank or of all: losses by step, state by name, weight copies by stage."""

    losses: list[float | None] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)


def train(
    schedule: Schedule,
    layers: Sequence[nn.Module],
    split: Sequence[int],
    optimizer_fn: Callable[[list[nn.Parameter]], Optimizer | list[Optimizer]],
    streams: Sequence[Calls],
    num_microbatches: int = 4,
    **options: Any,
) -> Trained:
    trainer = PipelineTrainer(
        layers, mse_loss, optimizer_fn, schedule,
        num_microbatches=num_microbatches, split=split, **options,
    )  # fmt: skip
    done = Trained()
    for calls in streams:
        done.losses += [trainer.step(*call) for call in calls]
        trainer.flush()
    for stage, copies in zip(trainer.stages, trainer.peak_weight_copies, strict=True):
        state = stage.module.state_dict()
        done.state.update((name, value.clone()) for name, value in state.items())
        done.copies[stage.index] = copies
    return done


@smooth_muon()
def train_case(case: Case, num_stages: int) -> Trained:
    schedule = case.schedule
    by_op = schedule.prediction == Displacement() and not case.optimizer.endswith("PredictedAdamW")
    if by_op and case.dtype == torch.float64:
        schedule = replace(schedule, prediction=Displacement(LastStep()))  # the ops take no float64
    return train(
        schedule,
        build_layers(case.dtype),
        case.split(num_stages),
        OPTIMIZERS[case.optimizer],
        case.streams,
        case.num_microbatches,
        correction=case.correction,
        scheduler_fn=partial(LambdaLR, lr_lambda=case.rates) if case.halving else None,
    )


def stand_still(schedule: Schedule, num_stages: int) -> Trained:
    """Train with a learning rate of 0, but with momentum to predict by."""
    layers, streams = build_layers(torch.float32), [build_calls(2, 12, torch.float32)]
    return train(schedule, layers, SPLITS[num_stages], OPTIMIZERS["resting"], streams)


def watch(schedule: Schedule, num_stages: int) -> list[tuple[list[float], list[float]]]:
    """Return the multiples of the first weights that each layer's passes have read."""
    layers = build_watched_layers(num_stages)
    split = range(4, 4 * num_stages, 4)
    if isinstance(schedule, PREDICTING):
        schedule = replace(schedule, prediction=Multiples())
    train(schedule, layers, split, Counting, [build_calls(3, 8, outputs=6)])
    return [(layer.forwards, layer.backwards) for layer in layers]


TWICE = [build_calls(3, 12), build_calls(1, 12)]


def train_with_exact_predictions(schedule: Schedule, num_stages: int) -> Trained:
    truth = train_sequentially(schedule)
    schedule = replace(schedule, prediction=Oracle(all_versions(truth)))
    layers, split, optimizer_fn = build_layers(), SPLITS[num_stages], OPTIMIZERS["momentum"]
    return train(schedule, layers, split, optimizer_fn, TWICE)


def train_sequentially(schedule: Schedule) -> reference.Trained:
    """Train without a pipeline, with as many updates."""
    single = PipeMare() if microbatches_per_update(schedule, 4) == 1 else GPipe()
    return reference.train_in_one_process(
        build_layers, [], mse_loss, OPTIMIZERS["momentum"], single, TWICE, 4
    )


def all_versions(done: reference.Trained) -> list[list[Tensor]]:
    (stage,) = done.stages
    return [list(version.weights().values()) for version in [*stage.past, *stage.history]]


def roll_downhill(schedule: Schedule, num_stages: int) -> Trained:
    """Train on a quadratic at a learning rate and momentum that diverge with stale gradients."""
    layers = [Shift(feature) for feature in range(num_stages)]
    zeros = torch.zeros(4, num_stages, dtype=torch.float64)
    optimizer_fn = partial(torch.optim.SGD, lr=0.12, momentum=0.9)
    return train(schedule, layers, range(1, num_stages), optimizer_fn, [[(zeros, zeros)] * 25])


CASES = [Case(schedule) for schedule in SCHEDULES if schedule != CORRECTED]
SINGLE_CASES = [Case(schedule, dtype=torch.float32) for schedule in SCHEDULES]
ADAM_CASES = [replace(case, optimizer="AdamW") for case in CASES]
ODD_CASES = [
    *(Case(schedule, "groups") for schedule in (PipeDream(), PipeDream2BW(), *PREDICTED)),
    *(Case(schedule, num_microbatches=2) for schedule in (PipeDream(), *PREDICTED)),
    *(Case(schedule, bare_stage=True) for schedule in (GPipe(), PipeDream(), *PREDICTED)),
    Case(PipeMare(annealing=10)),
    Case(CORRECTED, dtype=torch.float32),
    Case(CORRECTED, "AdamW", torch.float32),
    Case(PipeOptim("live", Rollout(0.5)), dtype=torch.float32),
]
# Every schedule, optimizer, dtype and size, but not all of their products.
ADAM_ONCE = [
    Case(schedule, "AdamW") for schedule in (ZeroBubble(), PipeDream2BW(), PipeMare(), *PREDICTED)
]
ODD_ONCE = [
    *(Case(each, "groups", num_microbatches=2) for each in (PipeDream(), *PREDICTED)),
    *(Case(each, bare_stage=True) for each in (GPipe(), PipeDream(), *PREDICTED[::3])),
    *ODD_CASES[-4:],
]
# All of them with Muon for matrices, and with each correction; of the products, one of each.
LATE = [
    PipeDream(), PipeDream2BW(), PipeMare(), Nesterov(), SpecTrain(1), SpecTrain(2),
    *(kind(mode) for kind in (PipeOptim, XPipe) for mode in ("live", "consistent")),
]  # fmt: skip
CORRECTIONS = [
    UpdateErrorFeedback(), UpdateErrorFeedback(0.5), UpdateErrorFeedback(None), StageMomentum(),
    StageMomentum(0.97),
]  # fmt: skip
MUON = "Muon, PredictedAdamW"
MUON_CASES = [Case(each, MUON) for each in LATE]
CORRECTED_CASES = [
    *(Case(each, MUON, correction=how) for each in LATE for how in CORRECTIONS),
    *(Case(each, name, correction=how) for each in LATE for how in CORRECTIONS[2:4]
      for name in ("momentum", "AdamW")),
    *(Case(each, MUON, num_microbatches=2, correction=how) for each in (XPipe(),)
      for how in CORRECTIONS),
]  # fmt: skip
REPEATING = [
    PipeOptim("live", LastUpdate()),
    PipeOptim("consistent", LastUpdate()),
    SpecTrain(1, LastUpdate()),
    XPipe("live", LastUpdate()),
]
REPEATING_CASES = [
    *(Case(each, name) for each in REPEATING for name in ("AdamW", "groups", MUON)),
    *(Case(each, MUON, halving=True) for each in (PipeDream(), *REPEATING)),
    *(Case(each, MUON, correction=how, halving=True) for each in (PipeDream(), *REPEATING)
      for how in CORRECTIONS[2:4]),
]  # fmt: skip
SINGLE_MUON_CASES = [
    Case(schedule, optimizer, torch.float32)
    for schedule in (PipeOptim("live"), PipeOptim("consistent"), XPipe("live"))
    for optimizer in ("Muon, AdamW", "Muon, fused AdamW", "NAdam")
]
LATE_CASES = [*MUON_CASES, *CORRECTED_CASES, *REPEATING_CASES, *SINGLE_MUON_CASES]
LATE_ONCE = [
    *(Case(each, MUON) for each in (PipeDream2BW(), PipeOptim("live"), PipeOptim("consistent"))),
    *(Case(each, MUON, correction=how) for each, how in zip(LATE, CORRECTIONS * 2, strict=True)),
    Case(XPipe("live"), num_microbatches=2, correction=CORRECTIONS[2]),
    Case(CORRECTED, dtype=torch.float32, correction=CORRECTIONS[0]),
    Case(PipeOptim("live"), "AdamW", correction=CORRECTIONS[3]),
    *(Case(each, MUON, halving=True) for each in REPEATING[:2]),
    Case(REPEATING[0], "groups"),
    Case(REPEATING[1], "Adadelta"),
    Case(PipeOptim("live"), "Lion, PredictedAdamW"),
    *SINGLE_MUON_CASES[:3],
]
WATCHED = [GPipe(), *(schedule for schedule in STREAMING if schedule != CORRECTED)]
STILL = list(dict.fromkeys([*EVERY_SCHEDULE, *FLUSHING, CORRECTED]))
EXACT = [
    PipeOptim("consistent"),
    PipeOptim("live"),
    SpecTrain(variant=2),
    XPipe("consistent"),
    XPipe("live"),
]
ROLLING = [PipeMare(), PipeOptim("live", Displacement(LastStep()))]

Size = tuple[int, int]  # stages, ranks
Job = tuple[Callable[[Any, int], Any], Case | Schedule]
DEEP = (4, 4)
CASES_OF: dict[Size, list[Case]] = {
    (1, 1): [*SINGLE_CASES, *ADAM_ONCE, *LATE_ONCE[:8]],
    (2, 2): [
        *(
            single if single.is_plain or single.schedule == CORRECTED else Case(single.schedule)
            for single in SINGLE_CASES
        ),
        *LATE_ONCE[:8],
    ],
    (4, 2): CASES,
    DEEP: [*CASES, *ADAM_ONCE, *ODD_ONCE, *LATE_ONCE],
}
EVERY_CASE_OF: dict[Size, list[Case]] = {
    (1, 1): [*CASES, *SINGLE_CASES, *ADAM_CASES],
    (2, 2): [*CASES, *SINGLE_CASES, *LATE_CASES],
    DEEP: [*CASES, *ADAM_CASES, *ODD_CASES, *LATE_CASES],
}
OTHER_CASES_OF = {
    size: [case for case in cases if case not in CASES_OF[size]]
    for size, cases in EVERY_CASE_OF.items()
}


def batched(cases: Sequence[Case], most: int) -> list[Sequence[Case]]:
    return [cases[begin : begin + most] for begin in range(0, len(cases), most)]


def train_cases(cases: Sequence[Case]) -> list[Job]:
    return [(train_case, case) for case in cases]


# Lists of jobs, each for one set of processes.
JOBS: dict[Size, list[list[Job]]] = {
    size: [train_cases(cases), *map(train_cases, batched(OTHER_CASES_OF.get(size, []), 70))]
    for size, cases in CASES_OF.items()
}
JOBS[DEEP] += [
    [
        *((watch, schedule) for schedule in WATCHED),
        *((train_with_exact_predictions, schedule) for schedule in EXACT),
        *((roll_downhill, schedule) for schedule in ROLLING),
    ],
    [(stand_still, schedule) for schedule in STILL],
]


def work(rank: int, size: Size, batch: int) -> list:
    return [job(what, size[0]) for job, what in JOBS[size][batch]]


@cache
def outcomes(size: Size, batch: int) -> list[Outcome]:
    """Return the outcomes of a list of jobs, run once for all tests."""
    return observe_ranks(size[1], work, size, batch)


def of_ranks(size: Size, *job: Any) -> list:
    """Return a job's result on each rank."""
    batch = next(number for number, jobs in enumerate(JOBS[size]) if job in jobs)
    done = outcomes(size, batch)
    failed = [f"{outcome.error}\n{outcome.log}" for outcome in done if outcome.error]
    assert not failed, "\n".join(failed)
    return [outcome.value[JOBS[size][batch].index(job)] for outcome in done]


def of_all_ranks(size: Size, *job: Any) -> Trained:
    """Return the states of all ranks together, and the losses of the last stage's rank."""
    ranks = of_ranks(size, *job)
    last = ranks[(size[0] - 1) % size[1]]
    whole = Trained(last.losses)
    for rank in ranks:
        assert rank is last or rank.losses == [None] * len(last.losses)
        whole.state.update(rank.state)
        whole.copies.update(rank.copies)
    return whole
