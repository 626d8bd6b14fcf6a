"""A failure on an interlocking stage ends all ranks, with one error that names it."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from pyparallel.pipeline import Interlocking, PipelineTrainer, StageError
from tests.pipeline.faults import raise_error, raise_in_backward

NUM_MICROBATCHES = 4


class Faulty(nn.Module):
    """An identity that applies a fault to the sixth microbatch, not counting trial runs."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.seen = 0

    def forward(self, x):
        self.seen += torch.is_grad_enabled()
        return self.fault(x) if self.seen == 6 else x


@dataclass(frozen=True)
class Case:
    """A fault, its place, and the end of the expected message."""

    window: int
    stage: int
    fault: object
    reason: str
    in_head: bool = False

    @property
    def message(self):
        return f"stage {self.stage} on rank {self.stage} failed in {self.reason}"


def train(case):
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Identity()) for _ in range(3)]
    heads = [nn.Sequential(nn.Linear(4, 4), nn.Identity()) for _ in range(2)]
    (heads if case.in_head else layers)[case.stage][1] = Faulty(case.fault)
    trainer = PipelineTrainer(
        layers,
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        Interlocking(case.window, heads),
        num_microbatches=NUM_MICROBATCHES,
        split=[1, 2],
    )
    for _ in range(4):
        trainer.step(torch.randn(8, 4), torch.randn(8, 4))
    trainer.flush()


KEY = "KeyError: 'no such thing'"
ZERO = "ZeroDivisionError: division by zero"
CASES = [
    *(
        Case(window, stage, raise_error, f"the forward of microbatch 5 ({stage}F5): {KEY}")
        for window in (1, 3)
        for stage in range(3)
    ),
    Case(1, 1, raise_error, f"the head's loss of microbatch 5 (1H5): {KEY}", in_head=True),
    Case(3, 0, raise_error, f"the head's loss of microbatch 5 (0H5): {KEY}", in_head=True),
    Case(2, 1, raise_in_backward, f"the head's loss of microbatch 5 (1H5): {ZERO}", in_head=True),
    Case(1, 1, raise_in_backward, f"the backward of microbatch 5 (1L5): {ZERO}"),
    Case(2, 0, raise_in_backward, f"the backward of microbatch 5 (0L5): {ZERO}"),
    Case(2, 1, raise_in_backward, f"the backward for the inputs of microbatch 5 (1I5): {ZERO}"),
    Case(2, 2, raise_in_backward, f"the backward of microbatch 5 (2L5): {ZERO}"),
    Case(3, 1, raise_in_backward, f"the backward of microbatch 5 (1L5): {ZERO}"),
]  # fmt: skip


# Every place of a failure with some window; one process has them all.
ON_RANKS = [CASES[0], CASES[2], CASES[4], *CASES[6:]]


def fail_in_each_case(rank):
    """Return the error of each case."""
    errors = []
    for case in ON_RANKS:
        try:
            train(case)
            errors.append(None)
        except StageError as error:
            errors.append(str(error))
    return errors


def test_every_rank_raises_an_error_that_names_the_failed_stage(ranks):
    for of_rank in ranks.run(3, fail_in_each_case):
        assert of_rank == [case.message for case in ON_RANKS]


def test_the_error_in_one_process_is_the_same():
    for case in CASES:
        with pytest.raises(StageError) as caught:
            train(case)
        assert str(caught.value) == case.message.replace(f"rank {case.stage}", "rank 0")
