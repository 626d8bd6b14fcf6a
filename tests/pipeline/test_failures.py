"""A failure on one stage ends all ranks within the timeout, with one error that names it."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel.pipeline import (
    GPipe,
    OneForwardOneBackward,
    PipeDream,
    PipelineTrainer,
    Schedule,
    StageError,
    ZeroBubble,
)
from pyparallel.pipeline.messages.format import Refusal, RefusalKind
from tests.pipeline.faults import raise_error, raise_in_backward

NUM_RANKS, NUM_MICROBATCHES = 3, 4


class Faulty(nn.Module):
    """An identity that applies a fault to the sixth microbatch."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.seen = 0

    def forward(self, x):
        self.seen += 1
        return self.fault(x) if self.seen == 6 else x


def train(rank, fault, stage, schedule):
    layers = []
    for index in range(NUM_RANKS):
        layers.append(nn.Linear(4, 4))
        layers.append(Faulty(fault) if index == stage else nn.Identity())
    trainer = PipelineTrainer(
        layers,
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        schedule,
        num_microbatches=NUM_MICROBATCHES,
        split=range(2, 2 * NUM_RANKS, 2),
    )
    try:
        for _ in range(4):
            trainer.step(torch.randn(8, 4), torch.randn(8, 4))
        trainer.flush()
    except StageError as error:
        with pytest.raises(RuntimeError, match=r"the pipeline has failed; create a new .*stage"):
            trainer.flush()
        raise error


def return_dict(x):
    return {"x": x}


def return_none_in_tuple(x):
    return x, None


def return_eight_bits(x):
    return x.to(torch.float8_e5m2)


def interrupt(x):
    raise KeyboardInterrupt("by the user")


@dataclass(frozen=True)
class Case:
    """A fault, its place, and the end of the message that every rank raises."""

    fault: object
    stage: int
    schedule: Schedule
    message: str

    @property
    def error(self):
        return f"StageError: stage {self.stage} on rank {self.stage} failed in {self.message}"


CASES = {
    **{
        f"forward of stage {stage}, {schedule}": Case(
            raise_error, stage, schedule,
            f"the forward of microbatch 5 ({stage}F5): KeyError: 'no such thing'")
        for schedule in (GPipe(), PipeDream(), ZeroBubble())
        for stage in range(NUM_RANKS)
    },
    "backward": Case(
        raise_in_backward, 1, PipeDream(),
        "the backward of microbatch 5 (1B5): ZeroDivisionError: division by zero"),
    "split backward": Case(
        raise_in_backward, 1, ZeroBubble(),
        "the backward for the inputs of microbatch 5 (1I5): ZeroDivisionError: division by zero"),
    "a dict to send": Case(
        return_dict, 0, GPipe(),
        "the forward of microbatch 5 (0F5): TypeError: the output of layers[1], Faulty, must be a "
        "tensor or a tuple of tensors, got dict; return the tensors themselves, or wrap the layer "
        "in a module that does"),
    "a tuple with None to send": Case(
        return_none_in_tuple, 0, GPipe(),
        "the forward of microbatch 5 (0F5): TypeError: the output of layers[1], Faulty, must be a "
        "tensor or a tuple of tensors, got a tuple with NoneType, Tensor; return the tensors "
        "themselves, or wrap the layer in a module that does"),
    "eight bits to send": Case(
        return_eight_bits, 0, GPipe(),
        "the forward of microbatch 5 (0F5): ValueError: tensors to send must be of a plain dtype, "
        "got torch.float8_e5m2"),
}  # fmt: skip


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def fail_when_others_have_finished(rank):
    """Fail on a rank from which the others expect no more messages."""
    trainer = PipelineTrainer(
        [nn.Linear(4, 4) for _ in range(3)],
        nn.functional.mse_loss,
        sgd,
        OneForwardOneBackward(),
        num_microbatches=NUM_MICROBATCHES,
        split=[1, 2],
        max_norm=1.0,
    )
    batch = torch.ones(8, 4)
    trainer.step(batch, batch)
    if rank == 0:  # when ranks 1 and 2 are about to clip
        trainer.stages[0].module.register_forward_hook(fail_in_last_backward())
    with pytest.raises(StageError) as caught:
        trainer.step(batch, batch)
    with pytest.raises(RuntimeError, match="the pipeline has failed; create a new PipelineTrainer"):
        trainer.evaluate(batch, batch)
    raise caught.value


def fail_in_last_backward():
    seen = []

    def hook(module, inputs, output):
        seen.append(output)
        return raise_in_backward(output) if len(seen) == NUM_MICROBATCHES else output

    return hook


FINISHED = (
    "stage 0 on rank 0 failed in the backward of microbatch 7 (0B7): ZeroDivisionError: "
    "division by zero"
)


def forge_a_refusal(rank):
    """Refuse a step in place of its second message."""
    trainer = PipelineTrainer(
        [nn.Linear(4, 4) for _ in range(NUM_RANKS)], nn.functional.mse_loss, sgd, GPipe(),
        num_microbatches=NUM_MICROBATCHES, split=[1, 2],
    )  # fmt: skip
    send = trainer._pipeline.built.p2p.send

    def forge(endpoint, number, value, *batch):
        send(endpoint, number, Refusal(RefusalKind.TYPE, "no") if number == 1 else value, *batch)

    if rank == 0:
        trainer._pipeline.built.p2p.send = forge
    trainer.step(torch.ones(8, 4), torch.ones(8, 4))


FORGED = (
    "rank 1 waited for the forward of microbatch 1 (1F1) on stage 1: rank 0 must refuse a step in "
    "place of its first message, got a refusal in place of another: no"
)


def make_other_calls(rank):
    group = dist.new_group([0, 1])
    if rank == 2:
        return
    trainer = PipelineTrainer(
        [nn.Linear(4, 4), nn.Linear(4, 4)], nn.functional.mse_loss, sgd, GPipe(),
        num_microbatches=NUM_MICROBATCHES, split=[1], process_group=group,
    )  # fmt: skip
    batch = torch.ones(8, 4)
    trainer.step(batch, batch)
    if rank == 0:
        trainer.flush()
    else:
        trainer.step(batch, batch)


def fail_in_each_case(rank):
    """Return the error of each case, as text."""
    errors = []
    for case in CASES.values():
        with pytest.raises(StageError) as caught:
            train(rank, case.fault, case.stage, case.schedule)
        errors.append(f"StageError: {caught.value}")
    return errors


def errors_of(ranks, job, *arguments):
    return [each.error for each in ranks.observe(NUM_RANKS, job, *arguments)]


def test_every_rank_raises_an_error_that_names_the_failed_stage_and_action(ranks):
    for name, case, *errors in zip(
        CASES, CASES.values(), *ranks.run(NUM_RANKS, fail_in_each_case), strict=True
    ):
        assert errors == [case.error] * NUM_RANKS, name


def test_ranks_that_expect_no_messages_raise_it_too(ranks):
    assert (
        errors_of(ranks, fail_when_others_have_finished) == [f"StageError: {FINISHED}"] * NUM_RANKS
    )


def test_a_refusal_amid_a_step_is_an_error_that_names_its_sender(ranks):
    assert errors_of(ranks, forge_a_refusal) == [f"StageError: {FORGED}"] * NUM_RANKS


def test_an_interrupt_ends_the_other_ranks(ranks):
    first, middle, last = errors_of(ranks, train, interrupt, 1, PipeDream())
    assert middle == "KeyboardInterrupt: by the user"
    place = "stage 1 on rank 1 failed in the forward of microbatch 5 (1F5)"
    assert first == last == f"StageError: {place}: KeyboardInterrupt: by the user"


def test_other_calls_on_another_rank_are_one_error(ranks):
    first, second, _ = errors_of(ranks, make_other_calls)
    assert first == second
    assert "do all ranks make the same calls, with the same schedule?" in first
