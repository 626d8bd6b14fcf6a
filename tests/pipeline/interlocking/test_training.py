"""Stages with windows train as one process does by plain autograd, whatever they are made of."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import StepLR

from pyparallel.pipeline import Farthest, Interlocking, Mean, PipelineTrainer, Sum
from pyparallel.pipeline.interlocking.runtime import InterlockingRuntime as Streaming
from pyparallel.pipeline.interlocking.stage import InterlockingStage
from tests.pipeline.interlocking.jobs import (
    DROPPING,
    EVERY_CASE,
    OF_TWO,
    OVER_RANKS,
    RULES,
    WINDOWS,
    Case,
    Judge,
    Trained,
    assert_same,
    chain,
    expected,
    interlock,
    language_calls,
    language_layers,
    of_pipe,
    same,
    state_of,
    token_loss,
    train_built,
    train_case,
    train_tied,
    values_of,
)
from tests.pipeline.interlocking.reference import InterlockingRuntime
from tests.pipeline.models import OPTIMIZERS, build_calls, build_layers
from tests.workers import run_ranks

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.mark.parametrize("case", EVERY_CASE, ids=str)
def test_one_process_trains_as_the_reference_does(case):
    assert_same(train_case(case, 4), expected(case, 4), TOLERANCE[case.dtype])


@pytest.mark.parametrize("case", OVER_RANKS, ids=str)
def test_so_does_a_rank_for_each_stage(case):
    assert_same(of_pipe(4, train_case, case), expected(case, 4), TOLERANCE[case.dtype])


@pytest.mark.parametrize("case", OF_TWO, ids=str)
def test_so_do_two_stages(case):
    assert_same(of_pipe(2, train_case, case), expected(case, 2))
    assert_same(train_case(case, 2), expected(case, 2))


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_a_single_stage_has_no_heads_and_learns_as_ever(num_microbatches):
    case = Case(1, num_microbatches=num_microbatches)
    assert_same(train_case(case, 1), expected(case, 1))


@pytest.mark.parametrize("case", DROPPING, ids=str)
def test_dropout_draws_what_it_draws_without_a_pipe(case):
    assert_same(train_case(case, 4), expected(case, 4))
    assert_same(of_pipe(4, train_case, case), expected(case, 4, seeded=True))


def test_losses_in_evaluation_are_those_of_the_model_whatever_the_window():
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


class Together:
    """Stages look for gradients only where they must wait for some, so that several are there."""

    def __init__(self, monkeypatch):
        self.sizes = []
        monkeypatch.setattr(Streaming, "_look_for_gradients", lambda *_: None)
        input_vjp = InterlockingStage.input_vjp

        def counting(stage, microbatch, gradients):
            self.sizes.append(len(gradients))
            return input_vjp(stage, microbatch, gradients)

        monkeypatch.setattr(InterlockingStage, "input_vjp", counting)


@pytest.mark.parametrize("case", [Case(4, Sum()), Case(4, Mean(), bare_stage=True)], ids=str)
def test_gradients_that_wait_together_go_through_a_stage_together(case, monkeypatch):
    alone = train_case(case, 4)
    together = Together(monkeypatch)
    assert_same(train_case(case, 4), alone)
    assert max(together.sizes) == 2


class Halved(torch.autograd.Function):
    """Reads the gradient as a number, which ``vmap`` has no rule for."""

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


@pytest.mark.parametrize("odd", [Halve, lambda: Recomputed(nn.Tanh(), nn.Dropout(0.2))])
def test_those_that_cannot_go_together_go_one_by_one(odd, monkeypatch):
    def train():
        stages, heads = chain()
        stages[1].append(odd())
        trainer = interlock(stages, heads, 4, Sum())
        torch.manual_seed(0)
        for call in build_calls(3, 6):
            trainer.step(*call)
        return state_of(trainer)

    alone = train()
    together = Together(monkeypatch)
    with pytest.warns(RuntimeWarning, match="stage 1 pulls gradients back one by one") as said:
        found = train()
    torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-12)
    assert max(together.sizes) == 2
    assert len(said) == 1


def test_batch_norm_sees_each_microbatch_once():
    for window in WINDOWS:
        case = Case(window, num_microbatches=3)
        *_, count = train_case(case, 4).state["1.module"]
        assert count == 10 * 3


@pytest.mark.parametrize("window", [1, 3])
def test_heads_may_share_the_embedding(window):
    found, alone = of_pipe(4, train_tied, window), train_tied(window, 4)
    wanted = tied_by_reference(window)
    assert_same(found, wanted)
    assert_same(alone, wanted)


class Tied(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.norm = nn.LayerNorm(6).double()
        self.embedding = (embedding,)  # in a tuple: not this module's

    def forward(self, value):
        return self.norm(value) @ self.embedding[0].weight.detach().T


def tied_by_reference(window):
    layers = language_layers()
    stages = [nn.Sequential(*layers[2 * s : 2 * s + 2]) for s in range(4)]
    heads = [Tied(layers[0]) for _ in range(3)]
    model = InterlockingRuntime(
        stages, heads, token_loss, OPTIMIZERS["momentum"], window, num_microbatches=2
    )
    return Trained([model.step(*call) for call in language_calls()], model.state())


def test_heads_are_built_alike_on_ranks_and_in_one_process():
    torch.manual_seed(0)
    wanted = train_built(5, 4)
    assert_same(of_pipe(4, train_built, 5), wanted)
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
        model = InterlockingRuntime(stages, heads, mse_loss, OPTIMIZERS["momentum"], window)
        mine, my_heads = build()
        trainer = interlock(mine, my_heads, window)
        for call in build_calls(3, 8):
            trainer.step(*call)
            model.step(*call)
        assert state_of(trainer).keys() == model.state().keys()
        torch.testing.assert_close(state_of(trainer), model.state(), rtol=1e-2, atol=1e-3)


def test_each_stage_has_an_optimizer_for_its_head_too_and_a_scheduler_of_its_own():
    stages, heads = chain()
    trainer = PipelineTrainer(
        stages, mse_loss, OPTIMIZERS["momentum"], Interlocking(2, heads), num_microbatches=3,
        split=[1, 2, 3], scheduler_fn=lambda optimizer: StepLR(optimizer, 2),
    )  # fmt: skip
    for call in build_calls(3, 6):
        trainer.step(*call)
    for stage, module, head in zip(trainer.stages, stages, [*heads, nn.Identity()], strict=True):
        (group,) = stage.optimizer.param_groups
        assert group["lr"] == pytest.approx(0.005)
        assert list(map(id, group["params"])) == [
            id(p) for p in (*module.parameters(), *head.parameters())
        ]


def test_the_loss_of_a_head_is_told():
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


def test_what_has_no_parameters_or_learns_nothing_lets_gradients_through():
    """A frozen stage, one without parameters, and a head without any."""
    for window, losses in itertools.product(WINDOWS, (Farthest(), Sum())):
        results = []
        for build in (interlocked_by_reference, interlock):
            stages, heads = chain()
            stages[1].requires_grad_(False)
            stages[2] = nn.Tanh()
            heads[0] = nn.Sequential(nn.Flatten(), nn.AvgPool1d(3))
            trainer = build(stages, heads, window, losses)
            for call in build_calls(3, 6):
                trainer.step(*call)
            results.append([values_of(module) for module in (*stages, *heads)])
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def interlocked_by_reference(stages, heads, window, losses):
    return InterlockingRuntime(
        stages, heads, mse_loss, OPTIMIZERS["momentum"], window, RULES[losses], num_microbatches=1
    )


def test_ranks_go_on_from_a_state_bit_for_bit():
    assert run_ranks(2, resume) == [{1: True, 2: True}] * 2


def resume(rank):
    return {window: goes_on(window) for window in (1, 2)}


def goes_on(window):
    def build(seed):
        layers = [*build_layers()[:5], nn.Dropout(0.2), *build_layers()[5:]]
        torch.manual_seed(seed)
        heads = [nn.Sequential(Judge(), nn.Dropout(0.2)).double()]
        return PipelineTrainer(
            layers, mse_loss, OPTIMIZERS["AdamW"], Interlocking(window, heads), num_microbatches=3,
            split=[7], scheduler_fn=lambda optimizer: StepLR(optimizer, 2, 0.5),
        )  # fmt: skip

    trainer, calls = build(1), build_calls(8, 13)
    for call in calls[:3]:
        trainer.step(*call)
    trainer.flush()
    state = copy.deepcopy(trainer.state_dict())
    generator = torch.get_rng_state()
    losses = [trainer.step(*call) for call in calls[3:]]
    trainer.flush()
    other = build(2)
    other.prepare(*calls[0])
    other.load_state_dict(state)
    torch.set_rng_state(generator)
    again = [other.step(*call) for call in calls[3:]]
    other.flush()
    rates = [each.stages[0].optimizer.param_groups[0]["lr"] for each in (trainer, other)]
    assert rates == [0.01 / 16] * 2
    here, there = state_of(trainer), state_of(other)
    return losses == again and all(same(here[name], there[name]) for name in here)


def test_a_state_is_loaded_into_stages_that_have_been_built():
    stages, heads = chain()
    trainer = interlock(stages, heads, 2)
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\) must come after prepare\("):
        trainer.load_state_dict({"0": {}, "1": {}})
