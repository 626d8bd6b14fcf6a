"""Models of which a part is frozen train as the unsplit model does, under every schedule."""

from functools import partial
from itertools import cycle

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pyparallel import optim
from pyparallel.pipeline import (
    Interlocking,
    LastUpdate,
    OneForwardOneBackward,
    PipeDream,
    PipelineTrainer,
    PipeMare,
    PipeOptim,
    StageError,
    XPipe,
)
from tests.cases import slow
from tests.pipeline.every_schedule import FLUSHING, one_of_each_kind
from tests.pipeline.jobs import IN_ANY_DTYPE, Case, train_case, train_on
from tests.pipeline.models import OPTIMIZERS, TRAINED, WIDTH, build_calls, build_layers
from tests.pipeline.test_equivalence import check

FREEZING = [
    Case(schedule, trained=what, max_norm=None if schedule in FLUSHING else 0.3)
    for what in TRAINED
    for schedule in IN_ANY_DTYPE
]
FIRST = zip(one_of_each_kind(IN_ANY_DTYPE), cycle(TRAINED), strict=False)
COVERING = [case for pair in FIRST for case in FREEZING if (case.schedule, case.trained) == pair]


@pytest.mark.parametrize(
    ("size", "cases"), [((4, 2), COVERING), slow((4, 1), FREEZING), slow((4, 4), FREEZING)]
)
def test_the_trained_layers_alone_change(size, cases, ranks, subtests):
    for case, found in zip(cases, train_on(ranks, size, train_case, cases), strict=True):
        with subtests.test(case=str(case)):
            check(size, case, found)
            for name, parameter in nn.Sequential(*case.layers()).named_parameters():
                assert torch.equal(parameter, found.state[name]) != parameter.requires_grad, name


class Recorder(nn.Module):
    """A linear layer that records the weights that its forwards read."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.read = []

    def forward(self, value):
        self.read.append(self.linear.weight.detach().clone())
        return self.linear(value)


def unfreeze_in_turn(rank, schedule, optimizer_fn):
    """Freeze and unfreeze the first stage; return whether its forwards read its frozen weights."""
    torch.manual_seed(0)
    layers = [Recorder(), nn.Tanh(), Recorder()]
    trainer = PipelineTrainer(
        layers, mse_loss, optimizer_fn, schedule, num_microbatches=4, split=[2]
    )
    mine = layers[0]
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    frozen = []
    for trains in (False, True, False, True):
        mine.linear.requires_grad_(trains)
        before = mine.linear.weight.detach().clone()
        mine.read.clear()
        for _ in range(3):
            trainer.step(x, y)
        trainer.flush()
        if rank == 0:
            assert torch.equal(mine.linear.weight, before) != trains
            frozen.append(all(torch.equal(each, before) for each in mine.read))
    return frozen


CASES = [
    (PipeOptim("live"), partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    (PipeOptim("consistent"), partial(torch.optim.AdamW, lr=0.1)),
    (PipeOptim("live"), partial(optim.AdamW, lr=0.1)),
    (PipeMare(decay=0.25), partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    (XPipe(prediction=LastUpdate()), partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    (OneForwardOneBackward(), partial(torch.optim.AdamW, lr=0.1)),
]


def unfreeze_all(rank):
    return [unfreeze_in_turn(rank, *case) for case in CASES]


def test_what_is_frozen_after_the_build_may_be_unfrozen_again(ranks, subtests):
    of_rank, _ = ranks.run(2, unfreeze_all)
    for case, frozen in zip(CASES, of_rank, strict=True):
        with subtests.test(case=str(case)):
            assert frozen == [True, False, True, False]


def step_and_flush(trainer, x, y):
    trainer.step(x, y)
    trainer.flush()


def unfreeze_too_late(rank, schedule):
    layers = build_layers(trained="the last layers")
    trainer = PipelineTrainer(
        layers, mse_loss, OPTIMIZERS["momentum"], schedule, num_microbatches=4, split=[6]
    )
    x, y = build_calls(1, 13)[0]
    trainer.step(x, y)
    layers[1].requires_grad_(True)
    with pytest.raises(StageError) as caught:
        step_and_flush(trainer, x, y)
    return str(caught.value)


def test_what_was_frozen_before_the_build_cannot_be_unfrozen(ranks, subtests):
    for schedule in (OneForwardOneBackward(), PipeDream()):
        with subtests.test(schedule=str(schedule)):
            (found,) = set(ranks.run(2, unfreeze_too_late, schedule))
            assert found == (
                "stage 0 on rank 0 failed in the forward of microbatch 4 (0F4): RuntimeError: "
                "parameters that train must be held by an optimizer of their stage, got 1.weight, "
                "which was unfrozen or added after the stage was built; create a new "
                "PipelineTrainer, or freeze what is to train later only after it was built"
            )


def test_what_was_unfrozen_may_be_added_to_the_optimizer_where_the_schedule_flushes():
    layers = build_layers(trained="the first layer")
    trainer = PipelineTrainer(
        layers, mse_loss, OPTIMIZERS["momentum"], OneForwardOneBackward(),
        num_microbatches=4, split=[6],
    )  # fmt: skip
    layers[1].requires_grad_(True)
    trainer.stages[0].optimizer.add_param_group({"params": layers[1].parameters()})
    before = layers[1].weight.detach().clone()
    trainer.step(*build_calls(1, 13)[0])
    assert not torch.equal(layers[1].weight, before)


@pytest.mark.parametrize("add", ["an adapter", "a parameter", "another layer"])
def test_what_is_added_after_the_build_is_an_error(add):
    """As an adapter that is injected later: nothing would train it."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Tanh()]
    for schedule in (OneForwardOneBackward(), PipeOptim()):
        trainer = PipelineTrainer(
            layers, mse_loss, OPTIMIZERS["momentum"], schedule, num_microbatches=2, split=[1]
        )
        x = torch.randn(4, WIDTH)
        trainer.step(x, x)
        trainer.flush()
        match add:
            case "an adapter":
                layers[1][0].requires_grad_(False).adapter = nn.Linear(WIDTH, 2)
            case "a parameter":
                layers[1][0].scale = nn.Parameter(torch.ones(WIDTH))
            case "another layer":
                layers[1][0] = nn.Linear(WIDTH, WIDTH)
        with pytest.raises(
            StageError, match=r"must be held by .*, got 1.0.\w+.*, which was .* added"
        ):
            trainer.step(x, x)
        layers[1] = nn.Sequential(nn.Linear(WIDTH, WIDTH))


def heads_and_layers():
    torch.manual_seed(5)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    return nn.Linear(WIDTH, WIDTH), layers


# In two steps.
@pytest.mark.parametrize("cases", [[[0], [0, 2]], slow([[2], [3], [0, 3], [0, 2, 3]])])
@pytest.mark.parametrize("window", [slow(1), 2])
def test_interlocking_trains_on_with_layers_that_are_frozen_later(window, cases, subtests):
    x, y = torch.randn(2, 8, WIDTH)
    for frozen in cases:
        head, layers = heads_and_layers()
        trainer = PipelineTrainer(
            layers, mse_loss, OPTIMIZERS["momentum"], Interlocking(window, head),
            num_microbatches=4, split=[3],
        )  # fmt: skip
        own_head, own_layers = heads_and_layers()
        model = nn.Sequential(*own_layers, own_head)
        optimizer = OPTIMIZERS["momentum"](list(model.parameters()))
        for step in range(5):
            trainer.flush()
            for index in frozen:
                layers[index].requires_grad_(step not in (1, 2))
                own_layers[index].requires_grad_(step not in (1, 2))
            trainer.step(x, y)
            value = model[:3](x)
            of_head = value if window == 1 else value.detach()
            sent = value.detach() if window == 1 else value
            losses = [mse_loss(own_head(of_head), y), mse_loss(model[3](sent), y)]
            for loss in losses:
                if loss.requires_grad:
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trainer.flush()
        with subtests.test(frozen=frozen):
            state = nn.Sequential(*layers, head).state_dict()
            torch.testing.assert_close(state, model.state_dict(), rtol=1e-5, atol=1e-6)


def test_a_head_that_was_frozen_before_the_build_cannot_be_unfrozen():
    head, layers = heads_and_layers()
    head.bias.requires_grad_(False)
    trainer = PipelineTrainer(
        layers, mse_loss, OPTIMIZERS["momentum"], Interlocking(1, head), num_microbatches=4,
        split=[3],
    )  # fmt: skip
    x, y = torch.randn(2, 8, WIDTH)
    trainer.step(x, y)
    trainer.flush()
    head.bias.requires_grad_(True)
    with pytest.raises(StageError, match=r"got head\.bias, which was unfrozen"):
        trainer.step(x, y)
