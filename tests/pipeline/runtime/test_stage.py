import copy
from functools import partial

import pytest
import torch
from torch import nn

from pyparallel.pipeline import GPipe, PipeDream, PipelineTrainer, PipeOptim, ZeroBubble

sgd = partial(torch.optim.SGD, lr=0.1)


WIDTH = 64


def build(layers, schedule, optimizer_fn=sgd, loss_fn=nn.functional.mse_loss, **options):
    """Return a trainer in one process, with each layer a stage."""
    return PipelineTrainer(
        layers, loss_fn, optimizer_fn, schedule,
        num_microbatches=4, split=range(1, len(layers)), **options,
    )  # fmt: skip


def linears(number):
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(number)]


def batch(samples=4, width=WIDTH):
    return torch.randn(samples, width)


def weights_of(layers):
    return torch.cat([p.detach().flatten() for layer in layers for p in layer.parameters()])


class Shifted(nn.Module):
    """A layer whose input and parameter gradients share memory."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1, WIDTH))

    def forward(self, x):
        return (x.view(-1) + self.shift.view(-1)).view(1, WIDTH)


@pytest.mark.parametrize("schedule", [GPipe(), ZeroBubble()])
def test_a_sent_gradient_is_not_accumulated_into(schedule):
    first, last = linears(2)
    layers = [first, Shifted(), last]
    single = copy.deepcopy(nn.Sequential(*layers))
    inputs, target = batch(), batch()
    build(layers, schedule).step(inputs, target)
    optimizer = sgd(single.parameters())
    for x, y in zip(inputs.split(1), target.split(1), strict=True):
        (nn.functional.mse_loss(single(x), y) / 4).backward()
    optimizer.step()
    torch.testing.assert_close(weights_of(layers), weights_of(single))


@pytest.mark.parametrize("schedule", [PipeDream(), PipeOptim(), GPipe()])
def test_autocast_around_the_loop_casts_the_current_weights(schedule):
    results = []
    for cache_enabled in (True, False):
        layers = linears(2)
        trainer = build(layers, schedule)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
            for _ in range(2):
                trainer.step(batch(), batch())
            trainer.flush()
        results.append(weights_of(layers))
    assert torch.equal(*results)


def test_gradients_from_before_training_are_cleared():
    layers = linears(2)
    layers[0].weight.grad = torch.full((WIDTH, WIDTH), 1e3)
    build(layers, GPipe()).step(batch(), batch())
    assert layers[0].weight.abs().max() < 1


def test_clipping_counts_the_optimized_parameters_only():
    layers = linears(2)
    layers[0].bias.requires_grad_(False)
    trainer = build(layers, GPipe(), max_norm=1e-3)
    layers[0].bias.grad = torch.full((WIDTH,), 1e9)
    before = layers[0].weight.detach().clone()
    trainer.step(batch(), batch())
    assert not torch.equal(layers[0].weight, before)


@pytest.mark.parametrize("schedule", [GPipe(), ZeroBubble()])
def test_inputs_may_come_from_a_graph(schedule):
    inputs = (batch().requires_grad_() * 2).exp()
    assert build(linears(2), schedule).step(inputs, batch()) > 0


def test_a_loss_that_is_not_differentiable_is_refused():
    trainer = build(linears(2), GPipe(), loss_fn=lambda output, target: output.detach().mean())
    with pytest.raises(ValueError, match="loss_fn must return a differentiable loss"):
        trainer.step(batch(), batch())


@pytest.mark.parametrize("schedule", [GPipe(), PipeDream(), ZeroBubble()])
def test_a_stage_may_begin_with_an_in_place_operation(schedule):
    results = []
    for inplace in (True, False):
        first, last = linears(2)
        trainer = build([first, nn.Sequential(nn.ReLU(inplace), last)], schedule)
        torch.manual_seed(1)
        trainer.step(batch(), batch())
        trainer.flush()
        results.append(weights_of([first, last]))
    assert torch.equal(*results)
