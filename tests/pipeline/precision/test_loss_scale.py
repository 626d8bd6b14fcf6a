"""A loss scale for float16, against torch's GradScaler on the unsplit model."""

import re
from functools import cache, partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import mse_loss

from pyparallel.pipeline import (
    GPipe,
    Interlocking,
    LinearHead,
    OneForwardOneBackward,
    PipelineTrainer,
    PipeOptim,
    StageError,
    ZeroBubble,
)

sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


NUM_MICROBATCHES, STEPS, MAX_NORM = 2, 8, 0.5


class Overflow(nn.Module):
    """A layer whose gradient overflows wherever an input is above a limit, as in float16."""

    def forward(self, value):
        if value.requires_grad and value.max() > 3:
            value.register_hook(lambda gradient: gradient * torch.inf)
        return value


def build_layers(dtype=torch.float64):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), Overflow(), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2)]
    return [layer.to(dtype) for layer in layers]


def batches(dtype=torch.float64):
    """Return batches of which two, the fourth and the seventh, overflow on the first stage."""
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        inputs = torch.randn(4, 4, generator=generator, dtype=dtype)
        yield (
            inputs * (100 if step in (3, 6) else 0.1),
            torch.randn(4, 2, generator=generator, dtype=dtype),
        )


def scaler():
    return GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


CASES = list(product((GPipe(), OneForwardOneBackward(), ZeroBubble()), (None, MAX_NORM)))


def train_all(rank):
    return [train(*case) for case in CASES]


def train(schedule, max_norm):
    """Return losses, the scale after each step, and the weights of this rank."""
    grad_scaler = scaler()
    trainer = PipelineTrainer(
        build_layers(), mse_loss, sgd, schedule, num_microbatches=NUM_MICROBATCHES, split=[2],
        max_norm=max_norm, grad_scaler=grad_scaler,
    )  # fmt: skip
    losses, scales = [], []
    for batch in batches():
        losses.append(trainer.step(*batch))
        scales.append(grad_scaler.get_scale())
    state = {k: v for stage in trainer.stages for k, v in stage.module.state_dict().items()}
    skipped = [trainer.metrics()[f"stage{each.index}/skipped_updates"] for each in trainer.stages]
    return losses, scales, {name: value.clone() for name, value in state.items()}, skipped


@cache
def train_unsplit(max_norm):
    model, grad_scaler = nn.Sequential(*build_layers()), scaler()
    optimizer, losses, scales = sgd(model.parameters()), [], []
    for inputs, target in batches():
        mean = 0
        for part, wanted in zip(inputs.chunk(2), target.chunk(2), strict=True):
            loss = mse_loss(model(part), wanted) / 2
            grad_scaler.scale(loss).backward()
            mean += loss.item()
        grad_scaler.unscale_(optimizer)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        optimizer.zero_grad()
        losses.append(mean)
        scales.append(grad_scaler.get_scale())
    return losses, scales, model.state_dict()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_updates_and_scales_are_those_of_the_unsplit_model(num_ranks, ranks, subtests):
    by_rank = [train_all(0)] if num_ranks == 1 else ranks.run(num_ranks, train_all)
    for (schedule, max_norm), *outcomes in zip(CASES, *by_rank, strict=True):
        with subtests.test(f"{schedule} {max_norm}"):
            losses, scales, weights = train_unsplit(max_norm)
            assert scales == [1024, 2048, 2048, 1024, 1024, 2048, 1024, 1024]
            state = {}
            for _, each, part, skipped in outcomes:
                assert each == scales
                assert set(skipped) == {2}
                state |= part
            assert outcomes[-1][0] == pytest.approx(losses, rel=1e-12)
            torch.testing.assert_close(state, dict(weights), rtol=1e-12, atol=1e-12)


def test_autocast_to_float16_trains():
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)]
    seen = []
    layers[2].register_forward_hook(lambda *args: seen.append(args[-1].dtype))
    layers[2].register_full_backward_hook(lambda *args: seen.append(args[-1][0].abs().max()))
    trainer = PipelineTrainer(
        layers, lambda output, target: mse_loss(output.float(), target), sgd, GPipe(),
        num_microbatches=NUM_MICROBATCHES, split=[2], grad_scaler=GradScaler("cpu"),
    )  # fmt: skip
    batch = next(batches(torch.float32))
    with torch.autocast("cpu", torch.float16):
        losses = [trainer.step(*batch) for _ in range(10)]
    assert losses[-1] < 0.8 * losses[0]
    assert seen[0] == torch.float16
    assert max(each for each in seen if isinstance(each, torch.Tensor)) > 100  # scaled


def make_mistakes(rank):
    errors = []
    for schedule, grad_scaler, dtype in [
        (PipeOptim(), scaler(), torch.float32),
        (Interlocking(1, LinearHead(2)), scaler(), torch.float32),
        (GPipe(), 1024.0, torch.float32),
        (GPipe(), scaler(), torch.float16),
        (GPipe(), GradScaler("cpu", init_scale=2.0**rank), torch.float32),
    ]:
        try:
            PipelineTrainer(
                build_layers(dtype), mse_loss, sgd, schedule,
                num_microbatches=NUM_MICROBATCHES, split=[2], grad_scaler=grad_scaler,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            errors.append(str(error))
    return errors


def test_a_scaler_that_does_not_fit_is_one_error_on_every_rank(ranks):
    first, second = ranks.run(2, make_mistakes)
    assert first == second
    for error, words in zip(
        first,
        [
            "ranks 0-1: grad_scaler must be None with PipeOptim, whose stages update at different",
            "ranks 0-1: grad_scaler must be None with Interlocking",
            "ranks 0-1: grad_scaler must be a torch.amp.GradScaler, or None, got 1024.0",
            "ranks 0-1: layers must be float32 with grad_scaler",
            "all ranks must have the same grad_scaler",
        ],
        strict=True,
    ):
        assert re.match(re.escape(words), error), error


def test_a_disabled_scaler_is_none():
    trainer = PipelineTrainer(
        build_layers(torch.float32), mse_loss, sgd, GPipe(), num_microbatches=NUM_MICROBATCHES,
        split=[2], grad_scaler=GradScaler("cpu", enabled=False),
    )  # fmt: skip
    batch = next(batches(torch.float32))
    assert trainer.step(*batch) is not None
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(StageError, match="without an enabled grad_scaler"),
    ):
        trainer.step(*batch)
