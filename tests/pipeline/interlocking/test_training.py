"""Interlocking stages of any kind train like the reference."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pyparallel.pipeline import Farthest, Mean, Sum
from pyparallel.pipeline.interlocking.runtime import InterlockingExecutor
from pyparallel.pipeline.interlocking.stage import InterlockingStage
from tests.pipeline.interlocking.jobs import (
    CASES,
    OF_TWO,
    OVER_RANKS,
    RULES,
    WINDOWS,
    WITH_DROPOUT,
    Case,
    assert_same,
    chain,
    expected,
    interlock,
    language_calls,
    language_layers,
    same,
    state_of,
    token_loss,
    train_built,
    train_case,
    train_tied,
    values_of,
)
from tests.pipeline.interlocking.reference import ReferenceTrainer
from tests.pipeline.jobs import DEEP, Trained, train_on
from tests.pipeline.models import OPTIMIZERS, build_calls

pytestmark = pytest.mark.slow  # 9 seconds; test_window_training.py has short runs

SINGLE = [Case(1, num_microbatches=1), Case(1, num_microbatches=3)]
RANKS = {(4, 1): CASES, (1, 1): SINGLE, DEEP: OVER_RANKS, (2, 2): OF_TWO}  # stages, ranks
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.mark.parametrize("size", RANKS, ids="{0[0]} stages on {0[1]} ranks".format)
def test_ranks_train_like_the_reference(size, ranks, subtests):
    cases = RANKS[size]
    for case, found in zip(cases, train_on(ranks, size, train_case, cases), strict=True):
        with subtests.test(case=str(case)):
            assert_same(found, expected(case, size[0]), TOLERANCE[case.dtype])


def test_dropout_is_that_of_its_stage_step_and_microbatch(ranks, subtests):
    trained = train_on(ranks, DEEP, train_case, WITH_DROPOUT)
    for case, found in zip(WITH_DROPOUT, trained, strict=True):
        with subtests.test(case=str(case)):
            assert_same(train_case(case, 4), expected(case, 4))
            assert_same(found, expected(case, 4))


def test_losses_in_evaluation_are_the_models_with_any_window():
    batch = build_calls(2, 7)[1]
    with torch.no_grad():
        model = nn.Sequential(*chain()[0])
        expected_loss = mse_loss(model(batch[0]), batch[1]).item()
    for window in WINDOWS:
        stages, heads = chain()
        before = [values_of(each) for each in (*stages, *heads)]
        trainer = interlock(stages, heads, window, num_microbatches=3)
        assert trainer.evaluate(*batch) == pytest.approx(expected_loss, rel=1e-12)
        assert all(map(same, before, map(values_of, (*stages, *heads))))


class Batching:
    """Disables polling, so that several gradients arrive before a stage handles them."""

    def __init__(self, monkeypatch):
        self.sizes = []
        monkeypatch.setattr(InterlockingExecutor, "_handle_ready_gradients", lambda *_: None)
        input_vjp = InterlockingStage.input_vjp

        def counting(stage, microbatch, gradients):
            self.sizes.append(len(gradients))
            return input_vjp(stage, microbatch, gradients)

        monkeypatch.setattr(InterlockingStage, "input_vjp", counting)


@pytest.mark.parametrize("case", [Case(4, Sum()), Case(4, Mean(), bare_stage=True)], ids=str)
def test_gradients_that_have_arrived_together_are_batched(case, monkeypatch):
    single = train_case(case, 4)
    batching = Batching(monkeypatch)
    assert_same(train_case(case, 4), single)
    assert max(batching.sizes) == 2


class Halved(torch.autograd.Function):
    """x / 2, with a backward that ``vmap`` does not support, as it calls item()."""

    @staticmethod
    def forward(ctx, value):
        return value / 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2 if gradient.abs().sum().item() else gradient


class Halve(nn.Module):
    def forward(self, value):
        return Halved.apply(value)


class Recomputed(nn.Sequential):
    def forward(self, value):
        return torch.utils.checkpoint.checkpoint(super().forward, value, use_reentrant=False)


@pytest.mark.parametrize("unsupported", [Halve, lambda: Recomputed(nn.Tanh(), nn.Dropout(0.2))])
def test_gradients_that_cannot_be_batched_go_one_by_one(unsupported, monkeypatch):
    def train():
        stages, heads = chain()
        stages[1].append(unsupported())
        trainer = interlock(stages, heads, 4, Sum())
        torch.manual_seed(0)
        for call in build_calls(3, 6):
            trainer.step(*call)
        return state_of(trainer)

    single = train()
    batching = Batching(monkeypatch)
    with pytest.warns(RuntimeWarning, match="stage 1 computes input gradients one by") as warned:
        found = train()
    torch.testing.assert_close(found, single, rtol=1e-12, atol=1e-12)
    assert max(batching.sizes) == 2
    assert len(warned) == 1


def test_heads_may_share_the_embedding(ranks):
    windows = [1, 3]
    for window, found in zip(windows, train_on(ranks, DEEP, train_tied, windows), strict=True):
        wanted = train_tied_reference(window)
        assert_same(found, wanted)
        assert_same(train_tied(window, 4), wanted)


class Tied(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.norm = nn.LayerNorm(6).double()
        self.embedding = (embedding,)  # in a tuple, so that it is not a submodule

    def forward(self, value):
        return self.norm(value) @ self.embedding[0].weight.detach().T


def train_tied_reference(window):
    layers = language_layers()
    stages = [nn.Sequential(*layers[2 * s : 2 * s + 2]) for s in range(4)]
    heads = [Tied(layers[0]) for _ in range(3)]
    model = ReferenceTrainer(
        stages, heads, token_loss, OPTIMIZERS["momentum"], window, num_microbatches=2
    )
    return Trained([model.step(*call) for call in language_calls()], model.state())


def test_heads_are_built_the_same_on_ranks_and_in_one_process(ranks):
    torch.manual_seed(0)
    wanted = train_built(5, 4)
    (found,) = train_on(ranks, DEEP, train_built, [5])
    assert_same(found, wanted)
    assert train_built(6, 4).losses != wanted.losses


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, value):
        return value.to(self.dtype)


def test_stages_may_be_of_several_dtypes():
    def build():
        stages, heads = chain()
        stages[0] = nn.Sequential(stages[0], Cast(torch.float32))
        stages[1] = nn.Sequential(stages[1].float(), Cast(torch.bfloat16))
        stages[2] = stages[2].bfloat16()
        stages[3] = nn.Sequential(Cast(torch.float64), stages[3])
        heads[1:] = [nn.Sequential(Cast(torch.float64), head) for head in heads[1:]]
        heads[0] = nn.Sequential(Cast(torch.float64), heads[0])
        return stages, heads

    for window in WINDOWS:
        stages, heads = build()
        model = ReferenceTrainer(stages, heads, mse_loss, OPTIMIZERS["momentum"], window)
        trainer = interlock(*build(), window)
        for call in build_calls(3, 8):
            trainer.step(*call)
            model.step(*call)
        assert state_of(trainer).keys() == model.state().keys()
        torch.testing.assert_close(state_of(trainer), model.state(), rtol=1e-2, atol=1e-3)


def test_head_loss_is_the_mean_over_the_step():
    stages, heads = chain()
    inputs, target = build_calls(1, 7)[0]
    with torch.no_grad():
        value, wanted = inputs, []
        for stage, head in zip(stages[:3], heads, strict=True):
            value = stage(value)
            wanted.append(mse_loss(head(value), target).item())
    trainer = interlock(stages, heads, 2, num_microbatches=3)
    trainer.step(inputs, target)
    assert [each.head_loss for each in trainer.stages[:3]] == pytest.approx(wanted)
    assert trainer.stages[3].head_loss is None


def test_gradients_pass_through_stages_without_trained_parameters():
    """A frozen stage, a stage and a head without parameters."""
    for window, losses in itertools.product(WINDOWS, (Farthest(), Sum())):
        results = []
        for build in (build_reference, interlock):
            stages, heads = chain()
            stages[1].requires_grad_(False)
            stages[2] = nn.Tanh()
            heads[0] = nn.Sequential(nn.Flatten(), nn.AvgPool1d(3))
            trainer = build(stages, heads, window, losses)
            for call in build_calls(3, 6):
                trainer.step(*call)
            results.append([values_of(module) for module in (*stages, *heads)])
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def build_reference(stages, heads, window, losses):
    return ReferenceTrainer(
        stages, heads, mse_loss, OPTIMIZERS["momentum"], window, RULES[losses], num_microbatches=1
    )


def test_a_state_cannot_be_loaded_before_the_stages_are_built():
    stages, heads = chain()
    trainer = interlock(stages, heads, 2)
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\) must come after the first"):
        trainer.load_state_dict({"0": {}, "1": {}})
