"""Trainings on ranks for test_equivalence: every case that they are compared in."""

import math
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
from tests.pipeline.every_schedule import EVERY_SCHEDULE, one_of_each_kind
from tests.pipeline.models import (
    OPTIMIZERS,
    SPLIT_WITH_BARE_STAGE,
    SPLITS,
    Shift,
    build_calls,
    build_layers,
    smooth_muon,
)
from tests.pipeline.oracles import LastStep, Oracle
from tests.pipeline.reference import microbatches_per_update
from tests.workers import RankPool

PREDICTING = (PipeOptim, SpecTrain, XPipe)
PREDICTED = [SpecTrain(1), XPipe("live"), PipeOptim("live"), PipeOptim("consistent")]
# All with one prediction, for which any optimizer will do.
SCHEDULES = [
    replace(each, prediction=Displacement()) if isinstance(each, PREDICTING) else each
    for each in EVERY_SCHEDULE
]
CORRECTED = PipeMare(annealing=10, decay=0.25)
# With a prediction for any dtype, which those of fused optimizers are not.
IN_ANY_DTYPE = [
    replace(each, prediction=Displacement(LastStep())) if isinstance(each, PREDICTING) else each
    for each in EVERY_SCHEDULE
    if each != CORRECTED
]

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
    max_norm: float | None = None
    skips: bool = False  # an update: a target of the second step has a nan
    trained: str = ""  # which layers are not frozen
    backend: str = ""  # of torch.compile

    @property
    def streams(self) -> list[Calls]:
        even = max(12, 2 * self.num_microbatches)  # batch normalization needs two
        large = build_calls(3, even + (not self.backend), self.dtype)  # shapes are compiled once
        if self.skips:
            large[1][1][8] = float("nan")
        return [large, build_calls(1, even, self.dtype)]

    def layers(self) -> list[nn.Module]:
        return build_layers(self.dtype, self.trained)

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

    losses: list[float] = field(default_factory=list)
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
    schedule, layers = case.schedule, case.layers()
    if case.backend:
        torch.compiler.reset()
        layers = [torch.compile(layer, backend=case.backend) for layer in layers]
    done = train(
        schedule,
        layers,
        case.split(num_stages),
        OPTIMIZERS[case.optimizer],
        case.streams,
        case.num_microbatches,
        correction=case.correction,
        scheduler_fn=partial(LambdaLR, lr_lambda=case.rates) if case.halving else None,
        max_norm=case.max_norm,
        nonfinite="skip" if case.skips else "raise",
    )
    done.state = {name.replace("_orig_mod.", ""): value for name, value in done.state.items()}
    return done


TWICE = [build_calls(3, 12), build_calls(1, 12)]


def train_with_exact_predictions(schedule: Schedule, num_stages: int) -> Trained:
    truth = train_sequentially(schedule)
    schedule = replace(schedule, prediction=Oracle(all_versions(truth)))
    layers, split, optimizer_fn = build_layers(), SPLITS[num_stages], OPTIMIZERS["momentum"]
    return train(schedule, layers, split, optimizer_fn, TWICE)


def train_sequentially(schedule: Schedule) -> reference.Trained:
    """Train without a pipeline, with as many updates."""
    single = PipeMare() if microbatches_per_update(schedule, 4) == 1 else GPipe()
    return train_on_one_stage(single)


@cache
def train_on_one_stage(single: Schedule) -> reference.Trained:
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


# Every schedule with every optimizer, dtype, size, correction and prediction, but not all products.
OF_EACH_KIND = one_of_each_kind(SCHEDULES)
CASES = [Case(schedule) for schedule in SCHEDULES if schedule != CORRECTED]
SINGLE_CASES = [Case(schedule, dtype=torch.float32) for schedule in SCHEDULES]
CORRECTIONS = [
    UpdateErrorFeedback(), UpdateErrorFeedback(0.5), UpdateErrorFeedback(None), StageMomentum(),
    StageMomentum(0.97),
]  # fmt: skip
LATE = [
    PipeDream(), PipeDream2BW(), PipeMare(), Nesterov(), SpecTrain(1), SpecTrain(2),
    *(kind(mode) for kind in (PipeOptim, XPipe) for mode in ("live", "consistent")),
]  # fmt: skip
REPEATING = [
    PipeOptim("live", LastUpdate()),
    PipeOptim("consistent", LastUpdate()),
    SpecTrain(1, LastUpdate()),
    XPipe("live", LastUpdate()),
]
MUON = "Muon, PredictedAdamW"
PREDICTED_2BW = [PipeDream2BW(mode, Displacement()) for mode in ("consistent", "live")]
STARTS = [  # within a step, after one, and after a flush that comes after 3 steps
    PipeOptim("consistent", synchronous_updates=2),
    SpecTrain(1, synchronous_updates=4),
    PipeDream2BW("consistent", Displacement(), synchronous_updates=1),
    XPipe("consistent", synchronous_updates=4),
    PipeOptim("live", synchronous_updates=14),
]
# A prediction uses the rate of the next update.
HALVING = [
    Case(each, name, halving=True)
    for each in (*PREDICTED, SpecTrain(2), XPipe("consistent"), *PREDICTED_2BW, *STARTS[:4])
    for name in ("momentum", "AdamW", "groups")
]
# Every optimizer: what it does is the same on any number of stages.
TWO_STAGES = [
    *(Case(each) for each in OF_EACH_KIND if not isinstance(each, PREDICTING)),
    *(Case(each, "AdamW") for each in (ZeroBubble(), PipeOptim("live"), XPipe("live"))),
    *(Case(each, "groups", num_microbatches=2) for each in (XPipe("live"), PipeOptim("live"))),
    *(Case(each) for each in PREDICTED_2BW),
    Case(PipeOptim("live", Rollout(0.5))),
    Case(REPEATING[1], "Adadelta"),
    Case(PipeOptim("live"), "Lion, PredictedAdamW"),
    Case(PipeOptim("live"), "Muon, fused AdamW", torch.float32),
]
FOUR_STAGES = [
    *CASES,
    *(Case(each, bare_stage=True) for each in (PipeDream(), PipeOptim("consistent"))),
    Case(PipeMare(annealing=10)),
    Case(CORRECTED, "AdamW", correction=CORRECTIONS[0]),
]
# Every correction, which changes the updates of a stage on its own rank.
ONE_PROCESS = [
    *(Case(each) for each in PREDICTED_2BW),
    *(Case(each, MUON, correction=how) for each, how in zip(LATE[::2], CORRECTIONS, strict=True)),
    *(Case(each, "AdamW", correction=how) for each, how in zip(STARTS, CORRECTIONS, strict=True)),
    Case(PipeMare(annealing=10, decay=0.5, synchronous_updates=5), correction=CORRECTIONS[0]),
    Case(XPipe("live"), num_microbatches=2, correction=CORRECTIONS[2]),
    Case(REPEATING[0], MUON, halving=True),
    *HALVING[:9:4],
    *(Case(each, correction=how, skips=True) for each, how in zip(
        (PipeDream(), PipeDream2BW(), *REPEATING[::2], REPEATING[3]), CORRECTIONS, strict=False)),
]  # fmt: skip
LATE_CASES = [
    *(Case(each, MUON) for each in LATE),
    *(Case(each, MUON, correction=how) for each in LATE for how in CORRECTIONS),
    *(Case(each, name, correction=how) for each in LATE for how in CORRECTIONS[2:4]
      for name in ("momentum", "AdamW")),
    *(Case(XPipe(), MUON, num_microbatches=2, correction=how) for how in CORRECTIONS),
    *(Case(each, name) for each in REPEATING for name in ("AdamW", "groups", MUON)),
    *(Case(each, MUON, halving=True) for each in (PipeDream(), *REPEATING)),
    *HALVING,
    Case(PipeOptim("consistent", Rollout(0.5)), halving=True),
    *(Case(each, name, torch.float32, halving=True) for each in PREDICTED
      for name in ("Muon, fused AdamW", "NAdam")),
    *(Case(each, MUON, correction=how, halving=True) for each in (PipeDream(), *REPEATING)
      for how in CORRECTIONS[2:4]),
    *(Case(each, optimizer, torch.float32)
      for each in (PipeOptim("live"), PipeOptim("consistent"), XPipe("live"))
      for optimizer in ("Muon, AdamW", "Muon, fused AdamW", "NAdam")),
]  # fmt: skip
ADAM_CASES = [replace(case, optimizer="AdamW") for case in CASES]
ODD_CASES = [
    *(Case(each, "groups", num_microbatches=number) for each in (PipeDream(), *PREDICTED)
      for number in (2, 4)),
    *(Case(each, num_microbatches=2) for each in (PipeDream(), *PREDICTED)),
    *(Case(each, bare_stage=True) for each in (GPipe(), PipeDream(), *PREDICTED)),
    Case(PipeDream2BW(), "groups"),
    *(Case(CORRECTED, name) for name in ("momentum", "AdamW")),
]  # fmt: skip
EXACT = [
    PipeOptim("consistent"),
    PipeOptim("live"),
    SpecTrain(variant=2),
    XPipe("consistent"),
    XPipe("live"),
]
ROLLING = [PipeMare(), PipeOptim("live", Displacement(LastStep()))]

Size = tuple[int, int]  # stages, ranks
SHARED = (4, 2)
DEEP = (4, 4)
CASES_OF: dict[Size, list[Case]] = {
    (1, 1): [Case(each, dtype=torch.float32) for each in OF_EACH_KIND],
    (2, 2): TWO_STAGES,
    (4, 1): ONE_PROCESS,
    SHARED: FOUR_STAGES[::3],
    (8, 1): [Case(each, num_microbatches=8) for each in (*PREDICTED_2BW, *STARTS[2:4])],
    DEEP: [Case(each) for each in OF_EACH_KIND],
}
COMPILED = [  # inductor compiles to C++, which takes long
    *(replace(case, backend="aot_eager") for case in CASES),
    *(Case(each, backend="inductor") for each in (ZeroBubble(), PipeMare())),
]
EVERY_CASE_OF: dict[Size, list[Case]] = {
    (1, 1): [*CASES, *SINGLE_CASES, *ADAM_CASES, *LATE_CASES[:20]],
    (2, 2): [*CASES, *SINGLE_CASES, *LATE_CASES],
    SHARED: FOUR_STAGES,
    DEEP: [*CASES, *ADAM_CASES, *ODD_CASES, *LATE_CASES, *COMPILED],
}
OTHER_CASES_OF = {
    size: [case for case in cases if case not in CASES_OF[size]]
    for size, cases in EVERY_CASE_OF.items()
}


def work(rank: int, num_stages: int, job: Callable, subjects: Sequence) -> list:
    return [job(subject, num_stages) for subject in subjects]


def run_on(ranks: RankPool, size: Size, job: Callable, subjects: Sequence) -> list[list]:
    """Return by subject, a case or a schedule, what a job returns on each rank."""
    found: list[list] = []
    for begin in range(0, len(subjects), 40):  # the threads of all groups of a run end with it
        some = subjects[begin : begin + 40]
        # A rank may compile for long while the others wait.
        limits = {"time_limit": 300, "group_timeout": 90}
        of_ranks = ranks.run(size[1], work, size[0], job, some, **limits)
        found += [list(each) for each in zip(*of_ranks, strict=True)]
    return found


def train_on(ranks: RankPool, size: Size, job: Callable, subjects: Sequence) -> list[Trained]:
    """Return by subject the states of all ranks, and the losses of the last stage's rank."""
    done = []
    for of_ranks in run_on(ranks, size, job, subjects):
        last = of_ranks[(size[0] - 1) % size[1]]
        done.append(Trained(last.losses))
        for rank in of_ranks:
            for step, loss in enumerate(rank.losses):  # that of this step, or of an earlier one
                assert math.isnan(loss) or loss in last.losses[: step + 1]
            done[-1].state.update(rank.state)
            done[-1].copies.update(rank.copies)
    return done
