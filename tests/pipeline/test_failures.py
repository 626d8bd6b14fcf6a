"""A failure on one stage ends all ranks within the timeout, with one error that names it."""

import pytest
import torch
from torch import nn

from pyparallel.pipeline import (
    GPipe,
    OneForwardOneBackward,
    PipeDream,
    PipelineTrainer,
    StageError,
    ZeroBubble,
)
from tests.pipeline.faults import die, raise_error, raise_in_backward
from tests.workers import observe_ranks

NUM_MICROBATCHES = 4


class Faulty(nn.Module):
    """An identity that applies a fault to the sixth microbatch."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.seen = 0

    def forward(self, x):
        self.seen += 1
        return self.fault(x) if self.seen == 6 else x


def train(rank, fault, stage, schedule, num_ranks):
    layers = []
    for index in range(num_ranks):
        layers.append(nn.Linear(4, 4))
        layers.append(Faulty(fault) if index == stage else nn.Identity())
    trainer = PipelineTrainer(
        layers,
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        schedule,
        num_microbatches=NUM_MICROBATCHES,
        split=range(2, 2 * num_ranks, 2),
    )
    try:
        for _ in range(4):
            trainer.step(torch.randn(8, 4), torch.randn(8, 4))
        trainer.flush()
    except StageError as error:
        with pytest.raises(RuntimeError, match=r"the pipeline has failed; create a new .*stage"):
            trainer.flush()
        raise error


def errors_of(fault, stage, schedule, num_ranks=3):
    return [
        outcome.error
        for outcome in observe_ranks(
            num_ranks, train, fault, stage, schedule, num_ranks, time_limit=60, group_timeout=20
        )
    ]


@pytest.mark.parametrize("schedule", [GPipe(), PipeDream(), ZeroBubble()])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_rank_raises_an_error_that_names_the_failed_stage(stage, schedule):
    errors = errors_of(raise_error, stage, schedule)
    assert set(errors) == {
        f"StageError: stage {stage} on rank {stage} failed in the forward of microbatch 5 "
        f"({stage}F5): KeyError: 'no such thing'"
    }


@pytest.mark.parametrize(
    ("schedule", "action"),
    [(PipeDream(), "the backward of microbatch 5 (1B5)"),
     (ZeroBubble(), "the backward for the inputs of microbatch 5 (1I5)")],
)  # fmt: skip
def test_every_rank_raises_an_error_that_names_a_failed_backward(schedule, action):
    (error,) = set(errors_of(raise_in_backward, 1, schedule))
    place = f"stage 1 on rank 1 failed in {action}"
    assert error == f"StageError: {place}: ZeroDivisionError: division by zero"


def return_dict(x):
    return {"x": x}


def return_none_in_tuple(x):
    return x, None


def return_eight_bits(x):
    return x.to(torch.float8_e5m2)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (return_dict, "TypeError: a layer's output must be a tensor or a tuple of tensors, got "
         "dict; return the tensors themselves"),
        (return_none_in_tuple, "TypeError: a layer's output must be a tensor or a tuple of "
         "tensors, got a tuple with NoneType, Tensor; return the tensors themselves"),
        (return_eight_bits, "ValueError: tensors to send must be of a plain dtype, got "
         "torch.float8_e5m2"),
    ],
)  # fmt: skip
def test_an_output_that_cannot_be_sent_is_refused(fault, reason):
    (error,) = set(errors_of(fault, 0, GPipe()))
    place = "stage 0 on rank 0 failed in the forward of microbatch 5 (0F5)"
    assert error == f"StageError: {place}: {reason}"


def not_a_number(x):
    return x * float("nan")


def test_a_loss_that_is_not_finite_is_an_error_on_every_rank():
    (error,) = set(errors_of(not_a_number, 1, PipeDream()))
    place = "stage 2 on rank 2 failed in the forward of microbatch 5 (2F5)"
    assert error == f"StageError: {place}: FloatingPointError: the loss must be finite, got nan"


@pytest.mark.parametrize("schedule", [GPipe(), PipeDream()])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_all_ranks_end_when_one_dies(stage, schedule):
    errors = errors_of(die, stage, schedule)
    dead = errors.pop(stage)
    assert dead == "ended without a result (killed, or its time limit: see the stacks)"
    for error in errors:
        assert error.startswith("StageError: rank ")
        assert f"rank {stage} died or did not respond within the process group's timeout" in error
        assert "of microbatch " in error


def step_on_a_bad_batch(rank, inputs, target, message):
    trainer = PipelineTrainer(
        [nn.Linear(4, 4), nn.Linear(4, 4)],
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        GPipe(),
        num_microbatches=NUM_MICROBATCHES,
        split=[1],
    )
    with pytest.raises(StageError, match=message):
        trainer.step(inputs, target)


@pytest.mark.parametrize(
    ("inputs", "target", "message"),
    [
        (
            None,
            torch.ones(8, 4),
            "0F0.*: ValueError: inputs must be given on the rank of",
        ),
        (torch.ones(8, 4), None, "1F0.*: ValueError: target must be given on the rank of"),
        (
            torch.ones(3, 4),
            torch.ones(3, 4),
            "0F0.*at least one for each of the 4 microbatches",
        ),
    ],
)
def test_a_bad_batch_is_one_error_on_every_rank(inputs, target, message):
    outcomes = observe_ranks(
        2, step_on_a_bad_batch, inputs, target, message, time_limit=60, group_timeout=20
    )
    assert [outcome.error for outcome in outcomes] == [None, None]


def fail_when_others_have_finished(rank, method):
    """Fail on a rank from which the others expect no more messages."""
    trainer = PipelineTrainer(
        [nn.Linear(4, 4) for _ in range(3)],
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        OneForwardOneBackward(),
        num_microbatches=NUM_MICROBATCHES,
        split=[1, 2],
        max_norm=1.0,
    )
    batch = torch.ones(8, 4)
    trainer.step(batch, batch)
    if method == "step" and rank == 0:  # when ranks 1 and 2 are about to clip
        trainer.stages[0].module.register_forward_hook(fail_in_last_backward())
    with pytest.raises(StageError) as caught:
        getattr(trainer, method)(batch, None if (method, rank) == ("evaluate", 2) else batch)
    with pytest.raises(RuntimeError, match="the pipeline has failed; create a new PipelineTrainer"):
        trainer.evaluate(batch, batch)
    return str(caught.value)


def fail_in_last_backward():
    seen = []

    def hook(module, inputs, output):
        seen.append(output)
        return raise_in_backward(output) if len(seen) == NUM_MICROBATCHES else output

    return hook


@pytest.mark.parametrize(
    ("method", "message"),
    [("evaluate", "stage 2 on rank 2 failed in the forward of microbatch 0 (2F0): ValueError: "
      "target must be given on the rank of the last stage, with Interlocking on every rank, got "
      "None"),
     ("step", "stage 0 on rank 0 failed in the backward of microbatch 7 (0B7): "
      "ZeroDivisionError: division by zero")],
)  # fmt: skip
def test_ranks_that_expect_no_messages_raise_it_too(method, message):
    outcomes = observe_ranks(
        3, fail_when_others_have_finished, method, time_limit=60, group_timeout=50
    )
    assert [(outcome.error, outcome.value) for outcome in outcomes] == [(None, message)] * 3


def interrupt(x):
    raise KeyboardInterrupt("by the user")


def test_an_interrupt_ends_the_other_ranks():
    first, middle, last = errors_of(interrupt, 1, PipeDream())
    assert middle == "KeyboardInterrupt: by the user"
    place = "stage 1 on rank 1 failed in the forward of microbatch 5 (1F5)"
    assert first == last == f"StageError: {place}: KeyboardInterrupt: by the user"


def make_other_calls(rank):
    trainer = PipelineTrainer(
        [nn.Linear(4, 4), nn.Linear(4, 4)],
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        GPipe(),
        num_microbatches=NUM_MICROBATCHES,
        split=[1],
    )
    batch = torch.ones(8, 4)
    trainer.step(batch, batch)
    if rank == 0:
        trainer.flush()
    else:
        trainer.step(batch, batch)


def test_other_calls_on_another_rank_are_one_error():
    outcomes = observe_ranks(2, make_other_calls, time_limit=60, group_timeout=20)
    assert outcomes[0].error == outcomes[1].error
    assert "do all ranks make the same calls, with the same schedule?" in outcomes[0].error
