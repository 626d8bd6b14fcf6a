"""Bad batches and losses that are not finite are errors that a pipeline survives."""

import math
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from pyparallel.comm import DisagreementError, NonFiniteError
from pyparallel.optim import AdamW
from pyparallel.pipeline import (
    Displacement,
    GPipe,
    Interlocking,
    PipeDream,
    PipeDream2BW,
    PipelineTrainer,
    PipeOptim,
    Sum,
    XPipe,
    ZeroBubble,
)
from pyparallel.pipeline.schedules.streaming import Streaming
from tests.cases import slow
from tests.pipeline import reference
from tests.pipeline.every_schedule import FLUSHING, one_of_each_kind_first
from tests.pipeline.jobs import PREDICTING, SCHEDULES
from tests.pipeline.models import OPTIMIZERS, as_on_gpus, build_calls, build_layers
from tests.pipeline.oracles import LastStep

NUM_MICROBATCHES = 4
SPLIT_OF = {2: [6], 3: [3, 6], 4: [3, 6, 9]}  # by the number of ranks
INPUTS = "rank 0{step}: inputs must be given on the rank of the first stage, got None"
SHORT = (
    "rank 0{step}: inputs must have one number of samples, at least one for each of the 4 "
    "microbatches, got [3]; use drop_last=True, or a smaller num_microbatches"
)
NARROW = "rank 0, step 1: inputs must be what the layers of the first stage take, got "
NOTHING = "rank 0: inputs must have one number of samples, at least one, got [0]"
TARGET = (
    "rank {last}{step}: target must be given on the rank of the last stage, with Interlocking on "
    "every rank, got None"
)
NAN = "rank {last}, step 1: the loss of microbatch 6 must be finite, got nan"


def calls_of(schedule):
    """Return four batches; the second has a nan in the target of its third microbatch."""
    calls = build_calls(4, 13, torch.float64)
    calls[1][1][8] = float("nan")
    return calls


def train(rank, schedule, refused):
    """Return the state, and the errors in their order, each with the call that raised it.

    Args:
        refused: make the calls that are refused before they begin, too; and with schedules that
            flush check losses late, and clip by a norm that changes nothing.
    """
    layers, last = build_layers(torch.float64), dist.get_world_size() - 1
    if isinstance(schedule, PREDICTING):
        schedule = replace(schedule, prediction=Displacement(LastStep()))
    late = refused and schedule in FLUSHING
    with as_on_gpus(late):
        trainer = PipelineTrainer(
            layers, mse_loss, OPTIMIZERS["momentum"], schedule,
            num_microbatches=NUM_MICROBATCHES, split=SPLIT_OF[last + 1],
            max_norm=1e9 if late else None,
        )  # fmt: skip
    (x, y), *others, final = calls_of(schedule)
    bad = x[:3] if rank == 0 else x, y  # ranks but the first do not see the inputs
    missing = None if rank == 0 else x, y
    no_target = x, None if rank == last else y
    errors = []

    def attempt(name, call, *batch):
        try:
            return call(*batch)
        except (ValueError, NonFiniteError) as error:
            text, _, _ = str(error).partition("RuntimeError")  # whose words are torch's
            errors.append((name, type(error).__name__, text))

    attempt("first", trainer.step, x, y)
    if refused:
        attempt("missing", trainer.step, *missing)
        attempt("short", trainer.step, *bad)
        attempt("narrow", trainer.step, x[:, 1:], y)
    for number, batch in enumerate(others):
        target = None if number == 1 and rank == last else batch[1]
        attempt(f"other {number}", trainer.step, batch[0], target)
    attempt("last", trainer.step, *final)
    attempt("flush", trainer.flush)
    if refused:
        attempt("evaluate nothing", trainer.evaluate, x[:0] if rank == 0 else x, y)
        attempt("evaluate without target", trainer.evaluate, *no_target)
        assert math.isfinite(trainer.evaluate(x, y))
        attempt("missing, empty", trainer.step, *missing)
    attempt("again", trainer.step, x, y)
    attempt("flush again", trainer.flush)
    trainer.state_dict()
    state = {}
    for stage in trainer.stages:
        state |= {name: value.clone() for name, value in stage.module.state_dict().items()}
    return state, errors


def train_all(rank, schedules, plainly):
    """Return of each schedule the states and errors: with refused calls; without them, if asked."""
    kinds = (True, False) if plainly else (True,)
    return [[train(rank, each, refused) for refused in kinds] for each in schedules]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@one_of_each_kind_first(SCHEDULES)
def test_training_goes_on_as_if_there_had_been_no_such_update(
    schedules, num_ranks, ranks, subtests
):
    found = ranks.run(num_ranks, train_all, schedules, num_ranks == 4, time_limit=150)
    for index, schedule in enumerate(schedules):
        with subtests.test(schedule=str(schedule)):
            check(schedule, [of_rank[index] for of_rank in found])


def check(schedule, of_ranks):
    last = len(of_ranks) - 1
    wanted, state = expected(schedule, SPLIT_OF[len(of_ranks)]), {}
    for (with_refused, errors), *plain in of_ranks:
        state |= with_refused
        dropped = [each for each in errors if each[0] in ("other 0", "other 1", "last", "flush")]
        for without, of_plain in plain:
            torch.testing.assert_close(with_refused, without, rtol=0, atol=0)
            assert of_plain == dropped
        nan, no_target = NAN.format(last=last), TARGET.format(last=last, step=", step 2")
        skipped = [("other 0", "NonFiniteError", nan), ("other 1", "DisagreementError", no_target)]
        if schedule not in FLUSHING:  # a stage may meet both in one call, at the latest in flush
            assert "; ".join(text for _, _, text in dropped) == f"{nan}; {no_target}"
            assert {kind for _, kind, _ in dropped} <= {"NonFiniteError", "DisagreementError"}
            skipped = dropped
        assert dropped == skipped
        assert errors == [
            ("missing", "DisagreementError", INPUTS.format(step=", step 1")),
            ("short", "DisagreementError", SHORT.format(step=", step 1")),
            ("narrow", "DisagreementError", NARROW),
            *skipped,
            ("evaluate nothing", "DisagreementError", NOTHING),
            ("evaluate without target", "DisagreementError", TARGET.format(last=last, step="")),
            ("missing, empty", "DisagreementError", INPUTS.format(step=", step 4")),
        ]
    tolerance = 1e-12
    torch.testing.assert_close(state, wanted, rtol=tolerance, atol=tolerance)


def expected(schedule, split):
    """Return the reference's state; to it a missing target is one of which no loss is finite."""
    first, *others, final = calls_of(schedule)
    others[1] = others[1][0], torch.full_like(others[1][1], float("nan"))
    return reference.train_in_one_process(
        partial(build_layers, torch.float64), split, mse_loss,
        OPTIMIZERS["momentum"], schedule, [[first, *others, final], [first]], NUM_MICROBATCHES,
    ).state  # fmt: skip


LOCAL = [  # the schedule, and which stages skip an update without the loss of stage 1, or 2
    (Interlocking(1, [nn.Linear(4, 4) for _ in range(2)]), {1}, {2}),
    (Interlocking(2, [nn.Linear(4, 4) for _ in range(2)]), {0, 1}, {1, 2}),
    (Interlocking(3, [nn.Linear(4, 4) for _ in range(2)]), {1}, {0, 1, 2}),
    (Interlocking(2, [nn.Linear(4, 4) for _ in range(2)], Sum()), {0, 1}, {1, 2}),
]
CHAIN = [PipeOptim(), ZeroBubble()]  # also on three ranks


def step_each(rank, schedule):
    """Return of each step whether this rank's stage has changed, and the error."""
    torch.manual_seed(0)
    trainer = PipelineTrainer(
        [nn.Linear(4, 4) for _ in range(3)], mse_loss, partial(torch.optim.SGD, lr=0.1), schedule,
        num_microbatches=3, split=[1, 2],
    )  # fmt: skip
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    nan = y.clone()
    nan[4] = float("nan")
    batches = [
        (x, y),
        (None if rank == 0 else x, y),
        (x, y),
        (x, None if rank == 1 else y),
        (x, nan if rank == 2 else y),
        (x, y),
    ]
    trainer.prepare(x, y)
    (stage,) = trainer.stages
    found = []
    for batch in batches:
        before = [each.clone() for each in stage.optimized]
        try:
            error = None
            trainer.step(*batch)
        except (ValueError, NonFiniteError) as raised:
            error = f"{type(raised).__name__}: {raised}"
        found.append((not all(map(torch.equal, before, stage.optimized)), error))
    trainer.flush()
    trainer.state_dict()
    return found


def step_all(rank):
    return [step_each(rank, schedule) for schedule, *_ in LOCAL], train_all(
        rank, CHAIN, plainly=True
    )


@pytest.mark.slow
def test_three_stages_and_interlocking_ones_without_a_loss_that_they_learn_from(ranks):
    found = ranks.run(3, step_all)
    for index, schedule in enumerate(CHAIN):
        check(schedule, [each[1][index] for each in found])
    for index, (schedule, *skipping) in enumerate(LOCAL):
        of_ranks = [each[0][index] for each in found]
        missing = "DisagreementError: rank 0, step 1: inputs must be given on the rank of"
        for rank, of_rank in enumerate(of_ranks):
            changed, errors = zip(*of_rank, strict=True)
            assert errors[1].startswith(missing)
            skips = [rank in stages for stages in skipping]
            assert changed == (True, False, True, not skips[0], not skips[1], True), schedule
            wanted = [
                "DisagreementError: rank 1, step 2: target must be given on the rank of the last "
                "stage, with Interlocking on every rank, got None",
                "NonFiniteError: rank 2, step 3: the loss of microbatch 11 must be finite, got nan",
            ]
            assert [*errors[3:5]] == [w if s else None for w, s in zip(wanted, skips, strict=True)]
            assert errors[0] is errors[2] is errors[5] is None


def build_alone(schedule, **options):
    torch.manual_seed(0)
    return PipelineTrainer(
        [nn.Linear(4, 4) for _ in range(3)], mse_loss, partial(torch.optim.SGD, lr=0.1), schedule,
        num_microbatches=2, split=[1, 2], **options,
    )  # fmt: skip


def test_one_process_refuses_a_bad_target_too_and_skips_without_an_error():
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    step_lr = partial(torch.optim.lr_scheduler.StepLR, step_size=100)
    for schedule in (GPipe(), PipeOptim()):
        trainer = build_alone(schedule, nonfinite="skip", scheduler_fn=step_lr)
        weights = [each for stage in trainer.stages for each in stage.optimized]
        before = [each.clone() for each in weights]
        for batch in ((None, y), (x, None), (x, y[:1]), (x[:, 1:], y), (x, y[:, 1:])):
            for call in (trainer.step, trainer.evaluate):
                with pytest.raises(
                    DisagreementError, match=r"^rank 0(, step 0)?: (inputs|target|loss_fn) "
                ) as caught:
                    call(*batch)
                raised = None not in batch and len(batch[1]) == len(x)
                assert (caught.value.__cause__ is not None) == raised
        loss = trainer.step(x, y * float("nan"))
        trainer.flush()
        assert math.isnan(loss)
        assert math.isnan(trainer.evaluate(x, y * float("nan")))
        assert all(map(torch.equal, before, weights))
        assert [each.last_epoch for stage in trainer.stages for each in stage.schedulers] == [0] * 3
        trainer.step(x, y)
        trainer.flush()
        assert not any(map(torch.equal, before, weights))


def test_a_policy_must_be_to_raise_or_to_skip():
    with pytest.raises(ValueError, match="nonfinite must be 'raise' or 'skip', got 'allow'"):
        build_alone(GPipe(), nonfinite="allow")


def skip_on_device(rank, cases):
    """Return of each case the weights and errors: losses checked on the host, on the device."""
    return [[skip_updates(*case, late) for late in (False, True)] for case in cases]


def skip_updates(schedule, max_norm, optimizer_fn, late):
    torch.manual_seed(0)
    last = dist.get_world_size() - 1
    layers = build_layers(torch.float32)
    with as_on_gpus(late):
        trainer = PipelineTrainer(
            layers, mse_loss, optimizer_fn, schedule,
            num_microbatches=NUM_MICROBATCHES, split=SPLIT_OF[last + 1], max_norm=max_norm,
        )  # fmt: skip
    batches = build_calls(4, 13, torch.float32)
    batches[1][1][8] = float("nan")
    batches[2][1][0] = float("inf")
    errors = []
    calls = [partial(trainer.step, *batch) for batch in batches]
    for index, call in enumerate([*calls, trainer.flush]):
        try:
            call()
        except NonFiniteError as error:
            errors.append((index, str(error)))
    weights = [p.clone() for stage in trainer.stages for p in stage.module.parameters()]
    return weights, [stage.optimizer.state_dict() for stage in trainer.stages], errors


# The learning rate of annealing goes on with an update that is skipped on the device.
ON_DEVICE = [
    each for each in SCHEDULES if isinstance(each, Streaming) and not getattr(each, "annealing", 0)
]


OURS, TORCHS = partial(AdamW, lr=0.1), partial(torch.optim.AdamW, lr=0.1, fused=True)
CLIPPED = [(PipeOptim(), 0.1, OURS), (PipeDream2BW(), 0.1, OURS), (PipeOptim(), 0.1, TORCHS)]
COVERING = [(PipeDream(), None, OURS), (XPipe(), None, OURS), (PipeDream(), None, TORCHS), *CLIPPED]


@pytest.mark.parametrize("cases", [COVERING, slow([*product(ON_DEVICE, [None], [OURS, TORCHS])])])
def test_updates_are_skipped_alike_on_the_device(cases, ranks, subtests):
    of_ranks = ranks.run(2, skip_on_device, cases, time_limit=150)
    for index, case in enumerate(cases):
        with subtests.test(case=str(case)):
            for rank, of_rank in enumerate(of_ranks):
                (weights, states, errors), (late_weights, late_states, late_errors) = of_rank[index]
                torch.testing.assert_close(late_weights, weights, rtol=0, atol=0)
                torch.testing.assert_close(late_states, states, rtol=0, atol=0)
                assert errors
                nan, inf = (NAN.format(last=1), "rank 1, step 2: the loss of microbatch 8 must be "
                            "finite, got inf")  # fmt: skip
                assert late_errors == ([(4, nan)] if rank == 0 else [(1, nan), (2, inf)])
