"""Steps inside autocast: forwards and losses run in it, backwards outside of it."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pyparallel.pipeline import PipelineTrainer, Schedule, StageError
from tests.pipeline import reference
from tests.pipeline.every_schedule import FLUSHING, one_of_each_kind_first
from tests.pipeline.jobs import IN_ANY_DTYPE, Trained, run_on, train, train_on
from tests.pipeline.models import OPTIMIZERS, SPLITS, build_calls, build_layers

FLOAT, BFLOAT = torch.float32, torch.bfloat16
STREAMS = [build_calls(3, 12, FLOAT), build_calls(1, 12, FLOAT)]
SGD = OPTIMIZERS["momentum"]
TWO = (2, 2)  # stages, ranks


def autocast() -> torch.autocast:
    return torch.autocast("cpu", BFLOAT)


class Observed(nn.Module):
    """Records dtypes of activations, and whether forwards and backwards run in autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, bool, torch.dtype]] = set()

    def forward(self, value):
        self.seen.add(("forward", torch.is_autocast_enabled("cpu"), value.dtype))
        if value.requires_grad:
            value.register_hook(self._on_gradient)
        return value.clone()

    def _on_gradient(self, gradient):
        self.seen.add(("backward", torch.is_autocast_enabled("cpu"), gradient.dtype))


def train_in_autocast(schedule: Schedule, num_stages: int) -> Trained:
    with autocast():
        return train(schedule, build_layers(FLOAT), SPLITS[num_stages], SGD, STREAMS)


def observe(schedule: Schedule, num_stages: int) -> set:
    observed = Observed()
    layers = [nn.Linear(6, 6), nn.Linear(6, 6), observed, nn.Linear(6, 2)]
    with autocast():
        train(schedule, layers, [2], SGD, STREAMS)
    return observed.seen


class Autocast(nn.Module):
    """A layer whose forward is in autocast, and whose backward is not."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value):
        with autocast():
            return self.layer(value)


def loss_in_autocast(output, target):
    with autocast():
        return mse_loss(output, target)


def expected(schedule: Schedule) -> Trained:
    done = reference.train_in_one_process(
        lambda: [Autocast(layer) for layer in build_layers(FLOAT)],
        SPLITS[2], loss_in_autocast, SGD, schedule, STREAMS, 4,
    )  # fmt: skip
    state = {name.replace(".layer.", "."): value for name, value in done.state.items()}
    return Trained(done.losses, state)


def unsplit() -> Trained:
    """Train the model with a plain loop as torch's documentation has it."""
    model, done = nn.Sequential(*build_layers(FLOAT)), Trained()
    optimizer = SGD([p for p in model.parameters() if p.requires_grad])
    with reference.one_thread():
        for inputs, target in [*STREAMS[0], *STREAMS[1]]:
            losses = []
            for x, y in zip(inputs.tensor_split(4), target.tensor_split(4), strict=True):
                with autocast():
                    losses.append(mse_loss(model(x), y) * 0.25)
                losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            done.losses.append(sum(each.item() for each in losses))
    return replace(done, state=model.state_dict())


@one_of_each_kind_first(IN_ANY_DTYPE)
def test_steps_inside_autocast_are_those_of_the_unsplit_model(schedules, ranks, subtests):
    plain = unsplit()
    trained = train_on(ranks, TWO, train_in_autocast, schedules)
    for schedule, found in zip(schedules, trained, strict=True):
        with subtests.test(schedule=schedule):
            wanted = plain if schedule in FLUSHING else expected(schedule)
            assert found.losses == pytest.approx(wanted.losses, rel=1e-6)
            torch.testing.assert_close(found.state, wanted.state, rtol=0, atol=0)


@one_of_each_kind_first(IN_ANY_DTYPE)
def test_backwards_are_outside_of_autocast_and_activations_are_sent_in_bfloat16(
    schedules, ranks, subtests
):
    of_schedules = run_on(ranks, TWO, observe, schedules)
    for schedule, of_ranks in zip(schedules, of_schedules, strict=True):
        with subtests.test(schedule=schedule):
            assert of_ranks[1] == {("forward", True, BFLOAT), ("backward", False, BFLOAT)}


def test_float16_is_refused():
    trainer = PipelineTrainer([nn.Linear(6, 2)], mse_loss, SGD, IN_ANY_DTYPE[0], num_microbatches=4)
    refused = "must not be called inside autocast to float16.*dtype=torch.bfloat16 to autocast"
    with torch.autocast("cpu", torch.float16), pytest.raises(StageError, match=refused):
        trainer.step(*STREAMS[0][0])
