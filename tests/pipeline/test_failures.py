"""A failure on one stage ends all ranks within the timeout, with one error that names it."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel.pipeline import (
    GPipe,
    Interlocking,
    OneForwardOneBackward,
    PipeDream,
    PipelineTrainer,
    Schedule,
    StageError,
    ZeroBubble,
)
from pyparallel.pipeline.messages.format import Refusal, RefusalKind
from tests.pipeline.faults import raise_error, raise_in_backward

sgd = partial(torch.optim.SGD, lr=0.1)


NUM_RANKS, NUM_MICROBATCHES = 3, 4


class Faulty(nn.Module):
    """An identity that applies a fault to the sixth microbatch, not counting trial runs."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.seen = 0

    def forward(self, x):
        self.seen += torch.is_grad_enabled()
        return self.fault(x) if self.seen == 6 else x


def place(number, fault, stage):
    """Return modules of which that of a stage has a fault."""
    return [Faulty(fault) if index == stage else nn.Identity() for index in range(number)]


def train(rank, fault, stage, schedule, window=None, in_head=False):
    layers = []
    for each in place(NUM_RANKS, fault, None if in_head else stage):
        layers += [nn.Linear(4, 4), each]
    if window is not None:
        heads = place(NUM_RANKS - 1, fault, stage if in_head else None)
        schedule = Interlocking(window, [nn.Sequential(nn.Linear(4, 4), each) for each in heads])
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
            trainer.step(torch.ones(8, 4), torch.ones(8, 4))
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
    schedule: Schedule | None
    message: str
    window: int | None = None  # of Interlocking
    in_head: bool = False

    @property
    def error(self):
        return f"stage {self.stage} on rank {self.stage} failed in {self.message}"

    def train(self, rank):
        train(rank, self.fault, self.stage, self.schedule, self.window, self.in_head)


KEY = "KeyError: 'no such thing'"
ZERO = "ZeroDivisionError: division by zero"
INTERLOCKING = {
    "forward of stage 2, window 1": Case(
        raise_error, 2, None, f"the forward of microbatch 5 (2F5): {KEY}", 1),
    "head of stage 0, window 3": Case(
        raise_error, 0, None, f"the head's loss of microbatch 5 (0H5): {KEY}", 3, in_head=True),
    "backward of a head": Case(
        raise_in_backward, 1, None, f"the head's loss of microbatch 5 (1H5): {ZERO}", 2,
        in_head=True),
    "backward of stage 0, window 2": Case(
        raise_in_backward, 0, None, f"the backward of microbatch 5 (0L5): {ZERO}", 2),
    "backward for the inputs": Case(
        raise_in_backward, 1, None,
        f"the backward for the inputs of microbatch 5 (1I5): {ZERO}", 2),
}  # fmt: skip
CASES = {
    **{
        f"forward of stage {stage}, {schedule}": Case(
            raise_error, stage, schedule, f"the forward of microbatch 5 ({stage}F5): {KEY}")
        for schedule, stage in [
            (GPipe(), 0), (PipeDream(), 1), (ZeroBubble(), 2),
        ]
    },
    "backward": Case(
        raise_in_backward, 1, PipeDream(), f"the backward of microbatch 5 (1B5): {ZERO}"),
    "split backward": Case(
        raise_in_backward, 1, ZeroBubble(),
        f"the backward for the inputs of microbatch 5 (1I5): {ZERO}"),
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
    **INTERLOCKING,
}  # fmt: skip


def build(layers, split, **options):
    return PipelineTrainer(
        [nn.Linear(4, 4) for _ in range(layers)], nn.functional.mse_loss, sgd,
        options.pop("schedule", GPipe()), num_microbatches=NUM_MICROBATCHES, split=split, **options,
    )  # fmt: skip


BATCH = torch.ones(8, 4), torch.ones(8, 4)


def ranks_that_expect_no_messages_raise_it_too(rank):
    """Fail on a rank from which the others expect no more messages."""
    trainer = build(3, [1, 2], schedule=OneForwardOneBackward(), max_norm=1.0)
    trainer.step(*BATCH)
    if rank == 0:  # when ranks 1 and 2 are about to clip
        trainer.stages[0].module.register_forward_hook(fail_in_last_backward())
    finished = rf"^stage 0 on rank 0 failed in the backward of microbatch 7 \(0B7\): {ZERO}$"
    with pytest.raises(StageError, match=finished):
        trainer.step(*BATCH)
    with pytest.raises(RuntimeError, match="the pipeline has failed; create a new PipelineTrainer"):
        trainer.evaluate(*BATCH)


def fail_in_last_backward():
    seen = []

    def hook(module, inputs, output):
        seen.append(output)
        return raise_in_backward(output) if len(seen) == NUM_MICROBATCHES else output

    return hook


def a_refusal_amid_a_step_is_an_error_that_names_its_sender(rank):
    """Refuse a step in place of its second message."""
    trainer = build(3, [1, 2])
    send = trainer._pipeline.built.p2p.send

    def forge(endpoint, number, value, *batch):
        send(endpoint, number, Refusal(RefusalKind.TYPE, "no") if number == 1 else value, *batch)

    if rank == 0:
        trainer._pipeline.built.p2p.send = forge
    with pytest.raises(StageError) as caught:
        trainer.step(*BATCH)
    assert str(caught.value) == (
        "rank 1 waited for the forward of microbatch 1 (1F1) on stage 1: rank 0 must refuse a step "
        "in place of its first message, got a refusal in place of another: no"
    )


def an_interrupt_ends_the_other_ranks(rank):
    place = r"stage 1 on rank 1 failed in the forward of microbatch 5 \(1F5\): KeyboardInterrupt: "
    error, text = (KeyboardInterrupt, "^by the") if rank == 1 else (StageError, f"^{place}by the")
    with pytest.raises(error, match=f"{text} user$"):
        train(rank, interrupt, 1, PipeDream())


def other_calls_on_another_rank_are_one_error(rank):
    group = dist.new_group([0, 1])
    if rank == 2:
        return None
    trainer = build(2, [1], process_group=group)
    trainer.step(*BATCH)
    sentence = r"the same calls, got flush\(\) after 1 step on rank 0, step 1 on rank 1;"
    with pytest.raises(StageError, match=sentence) as caught:
        trainer.step(*BATCH) if rank else trainer.flush()
    return str(caught.value)


OTHERS = [
    ranks_that_expect_no_messages_raise_it_too,
    a_refusal_amid_a_step_is_an_error_that_names_its_sender,
    an_interrupt_ends_the_other_ranks,
    other_calls_on_another_rank_are_one_error,
]


def fail_in_each_case(rank):
    """Return the error of each case, as text."""
    errors = []
    for case in CASES.values():
        with pytest.raises(StageError) as caught:
            case.train(rank)
        errors.append(str(caught.value))
    return errors


def test_every_rank_raises_an_error_that_names_the_failed_stage_and_action(ranks):
    by_rank = ranks.run(NUM_RANKS, fail_in_each_case)
    for (name, case), *errors in zip(CASES.items(), *by_rank, strict=True):
        assert errors == [case.error] * NUM_RANKS, name


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.__name__)
def test_other_failures(case, ranks):
    first, second, _ = ranks.run(NUM_RANKS, case)
    assert first == second


def test_the_error_in_one_process_is_the_same():
    for case in INTERLOCKING.values():
        with pytest.raises(StageError) as caught:
            case.train(0)
        assert str(caught.value) == case.error.replace(f"rank {case.stage}", "rank 0")
