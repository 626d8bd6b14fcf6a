"""Bad batches and losses that are not finite are errors that a pipeline survives."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

from pyparallel.comm import NonFiniteError
from pyparallel.pipeline import Displacement, PipelineTrainer
from tests.pipeline import reference
from tests.pipeline.every_schedule import FLUSHING
from tests.pipeline.jobs import CORRECTED, PREDICTING, SCHEDULES
from tests.pipeline.models import OPTIMIZERS, SPLITS, build_calls, build_layers
from tests.pipeline.oracles import LastStep

NUM_STAGES, NUM_MICROBATCHES = 4, 4
INPUTS = "rank 0{step}: inputs must be given on the rank of the first stage, got None"
SHORT = (
    "rank 0{step}: inputs must have one number of samples, at least one for each of the 4 "
    "microbatches, got [3]; use drop_last=True, or fewer microbatches"
)
TARGET = (
    "rank {last}{step}: target must be given on the rank of the last stage, with Interlocking on "
    "every rank, got None"
)
NAN = "rank {last}, step 1: the loss of microbatch 6 must be finite, got nan"


def dtype_of(schedule):
    return torch.float32 if schedule == CORRECTED else torch.float64  # its op takes no float64


def calls_of(schedule):
    """Return four batches; the second has a nan in the target of its third microbatch."""
    calls = build_calls(4, 13, dtype_of(schedule))
    calls[1][1][8] = float("nan")
    return calls


def train(rank, schedule, refused, **options):
    """Return the state, and the errors in their order, each with the call that raised it.

    Args:
        refused: make the calls that are refused before they begin, too.
    """
    layers, last = build_layers(dtype_of(schedule)), dist.get_world_size() - 1
    if isinstance(schedule, PREDICTING):
        schedule = replace(schedule, prediction=Displacement(LastStep()))
    trainer = PipelineTrainer(
        layers, mse_loss, OPTIMIZERS["momentum"], schedule,
        num_microbatches=NUM_MICROBATCHES, split=SPLITS[NUM_STAGES], **options,
    )  # fmt: skip
    trainer._criterion.defers_check = refused and schedule in FLUSHING
    (x, y), *others, final = calls_of(schedule)
    bad = x[:3] if rank == 0 else x, y  # ranks but the first do not see the inputs
    missing = None if rank == 0 else x, y
    no_target = x, None if rank == last else y
    errors = []

    def attempt(name, call, *batch):
        try:
            return call(*batch)
        except (ValueError, NonFiniteError) as error:
            errors.append((name, type(error).__name__, str(error)))

    attempt("first", trainer.step, x, y)
    if refused:
        attempt("missing", trainer.step, *missing)
        attempt("short", trainer.step, *bad)
    for number, batch in enumerate(others):
        target = None if number == 1 and rank == last else batch[1]
        attempt(f"other {number}", trainer.step, batch[0], target)
    attempt("last", trainer.step, *final)
    attempt("flush", trainer.flush)
    if refused:
        attempt("evaluate short", trainer.evaluate, *bad)
        attempt("evaluate without target", trainer.evaluate, *no_target)
        loss = trainer.evaluate(x, y)
        assert (loss is not None) == (rank == last)
        attempt("missing, empty", trainer.step, *missing)
    attempt("again", trainer.step, x, y)
    attempt("flush again", trainer.flush)
    trainer.state_dict()
    state = {}
    for stage in trainer.stages:
        state |= {name: value.clone() for name, value in stage.module.state_dict().items()}
    return state, errors


def train_all(rank):
    """Return of each schedule the state with and without refused calls, and the errors."""
    return [
        (train(rank, each, refused=False), train(rank, each, refused=True)) for each in SCHEDULES
    ]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_training_goes_on_as_if_there_had_been_no_such_update(ranks, subtests, num_ranks):
    found = ranks.run(num_ranks, train_all, time_limit=150)
    for index, schedule in enumerate(SCHEDULES):
        with subtests.test(schedule=str(schedule)):
            check(schedule, [of_rank[index] for of_rank in found])


def check(schedule, of_ranks):
    last = len(of_ranks) - 1
    wanted, state = expected(schedule), {}
    for (without, dropped), (with_refused, errors) in of_ranks:
        torch.testing.assert_close(with_refused, without, rtol=0, atol=0)
        state |= without
        nan, no_target = NAN.format(last=last), TARGET.format(last=last, step=", step 2")
        skipped = [("other 0", "NonFiniteError", nan), ("other 1", "DisagreementError", no_target)]
        if schedule not in FLUSHING:  # a stage may meet both in one call, at the latest in flush
            assert "; ".join(text for _, _, text in dropped) == f"{nan}; {no_target}"
            assert {name for name, _, _ in dropped} <= {"other 0", "other 1", "last", "flush"}
            assert {kind for _, kind, _ in dropped} <= {"NonFiniteError", "DisagreementError"}
            skipped = dropped
        assert dropped == skipped
        assert errors == [
            ("missing", "DisagreementError", INPUTS.format(step=", step 1")),
            ("short", "DisagreementError", SHORT.format(step=", step 1")),
            *skipped,
            ("evaluate short", "DisagreementError", SHORT.format(step="")),
            ("evaluate without target", "DisagreementError", TARGET.format(last=last, step="")),
            ("missing, empty", "DisagreementError", INPUTS.format(step=", step 4")),
        ]
    tolerance = 1e-5 if dtype_of(schedule) == torch.float32 else 1e-12
    torch.testing.assert_close(state, wanted, rtol=tolerance, atol=tolerance)


def expected(schedule):
    """Return the reference's state; to it a missing target is one of which no loss is finite."""
    first, *others, final = calls_of(schedule)
    others[1] = others[1][0], torch.full_like(others[1][1], float("nan"))
    return reference.train_in_one_process(
        partial(build_layers, dtype_of(schedule)), SPLITS[NUM_STAGES], mse_loss,
        OPTIMIZERS["momentum"], schedule, [[first, *others, final], [first]], NUM_MICROBATCHES,
    ).state  # fmt: skip
