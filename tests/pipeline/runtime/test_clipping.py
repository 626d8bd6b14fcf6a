"""Clipping by the norm of the whole model, with schedules that flush and those that do not."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from pyparallel.comm import Run
from pyparallel.compression import Cast
from pyparallel.pipeline import (
    Interleaved,
    Nesterov,
    OneForwardOneBackward,
    PipeDream,
    PipeDream2BW,
    PipelineTrainer,
    PipeMare,
    PipeOptim,
    SpecTrain,
    StageMomentum,
    UpdateErrorFeedback,
    XPipe,
)
from pyparallel.pipeline.runtime.clipping import LastNormClipper, clip_grad_norm_
from tests.cases import slow_unless
from tests.ops.op_counter import OpCounter
from tests.pipeline import jobs
from tests.pipeline.jobs import Case, train_case
from tests.pipeline.models import OPTIMIZERS
from tests.pipeline.test_equivalence import check, expected

sgd = partial(torch.optim.SGD, lr=0.5)


def build_layers():
    torch.manual_seed(0)
    hidden = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()]
    return [*hidden, nn.Linear(8, 8), nn.Linear(8, 2)]


def test_the_kernels_of_clipping_do_not_grow_with_the_number_of_gradients():
    dtypes = [torch.float32] * 40 + [torch.bfloat16] * 2
    gradients = [torch.ones(3, dtype=dtype, device="meta") for dtype in dtypes]
    of_each = "linalg_vector_norm", "pow", "copy_", "mul_"
    with OpCounter(*of_each, "_foreach_norm", "stack", "_foreach_mul_") as ops:
        clip_grad_norm_(gradients, 1.0, Run(None))
    assert ops.calls == {"_foreach_norm": 1, "stack": 1, "pow": 1, "_foreach_mul_": 2}


def build(layers, schedule, split):
    return PipelineTrainer(
        layers, nn.functional.mse_loss, sgd, schedule,
        num_microbatches=2, split=split, max_norm=0.05,
    )  # fmt: skip


def train(schedule, split):
    layers = build_layers()
    whole = copy.deepcopy(nn.Sequential(*layers))
    trainer = build(layers, schedule, split)
    optimizer = sgd(whole.parameters())
    torch.manual_seed(1)
    norms = []
    for _ in range(4):
        inputs, target = torch.randn(6, 4), torch.randn(6, 2)
        trainer.step(inputs, target)
        nn.functional.mse_loss(whole(inputs), target).backward()
        norms.append(nn.utils.clip_grad_norm_(whole.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    expected = whole.state_dict()
    for stage in trainer.stages:
        for name, value in stage.module.state_dict().items():
            torch.testing.assert_close(value, expected[name])
    return min(norms) > 0.05


def work(rank):
    return train(OneForwardOneBackward(), [2, 4]), train(Interleaved(), [1, 2, 3, 4, 5])


def test_the_norm_is_that_of_the_whole_model(ranks):
    assert ranks.run(3, work) == [(True, True)] * 3


MAX_NORM = 0.3
STREAMED = [
    Case(PipeOptim("live"), "AdamW"),
    Case(PipeOptim("consistent"), "AdamW"),
    Case(PipeDream(), correction=UpdateErrorFeedback(None)),
    Case(PipeDream2BW(), "AdamW", skips=True),
    Case(SpecTrain(1)),
    Case(XPipe("live"), correction=StageMomentum()),
    Case(PipeMare(annealing=10), skips=True),
    Case(Nesterov(), "AdamW"),
]
SIZES = slow_unless([(2, 2)], [(1, 1), (2, 2), (4, 1), (4, 2), (4, 4)])  # stages, ranks


@pytest.mark.parametrize("size", SIZES, ids="{0[0]} stages, {0[1]} ranks".format)
def test_without_a_flush_each_stage_clips_by_the_last_norms(ranks, subtests, size):
    cases = [replace(each, max_norm=MAX_NORM) for each in STREAMED]
    for case, found in zip(cases, jobs.train_on(ranks, size, train_case, cases), strict=True):
        with subtests.test(case=str(case)):
            check(size, case, found)
            free = expected(replace(case, max_norm=1e9), size[0]).state
            assert not torch.allclose(found.state["0.weight"], free["0.weight"], rtol=1e-3)


def train_in_16_bits(rank):
    """Return for each schedule the weights with and without a compressor that changes nothing."""
    both = {name: Cast(torch.bfloat16) for name in ("compress_activations", "compress_gradients")}
    cases = [Case(each, dtype=torch.bfloat16) for each in (PipeDream(), PipeDream2BW())]
    return [
        [
            jobs.train(
                case.schedule, case.layers(), case.split(2), OPTIMIZERS["momentum"], case.streams,
                max_norm=MAX_NORM, **options,
            ).state
            for options in ({}, both)
        ]
        for case in cases
    ]  # fmt: skip


def test_norms_are_not_compressed(ranks):
    for of_rank in ranks.run(2, train_in_16_bits):
        for plain, compressed in of_rank:
            torch.testing.assert_close(compressed, plain, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_16_bit_gradients_are_neither_rounded_nor_infinite(dtype):
    torch.manual_seed(0)
    whole = 300 * torch.randn(5000, dtype=torch.float64).to(dtype)  # whose squares overflow
    norm = whole.double().norm()
    expected = (whole.double() / norm).to(dtype)
    clipper = LastNormClipper(1.0)
    gathered, streamed = ([each.clone() for each in whole.split(1000)] for _ in range(2))
    clip_grad_norm_(gathered, 1.0, Run())
    clipper.norm_from_here(streamed, whole.device)
    clipper.clip_(streamed, None)
    for found in (gathered, streamed):
        torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=0)
