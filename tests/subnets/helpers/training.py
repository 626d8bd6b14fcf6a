"""Batches, steps and results of trainings, the same in every test of subnets."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pyparallel import SubnetTrainer


def batch_of(step: int, rank: int, shape: tuple[int, ...] = (4, 5)) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, the same ones every time."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randn((*shape[:-1], 3), generator=generator, dtype=torch.float64)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    rank: int,
    shape: tuple[int, ...] = (4, 5),
) -> None:
    """Fit the targets, or zeros where the outputs have another shape."""
    for step in steps:
        inputs, targets = batch_of(step, rank, shape)
        optimizer.zero_grad()
        output = model(inputs)
        fits = output.shape == targets.shape
        loss = nn.functional.mse_loss(output, targets) if fits else output.square().mean()
        loss.backward()
        optimizer.step()


def held(trainer: SubnetTrainer) -> dict[str, Tensor]:
    """Return a copy of the full model's state."""
    with trainer.full_model() as module:
        return {key: value.clone() for key, value in module.state_dict().items()}
