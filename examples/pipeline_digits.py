"""Handwritten digits for train_pipeline.py: scikit-learn's 1,797 of 8 x 8 pixels, no download."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from digits_net import build_net_to_cut
from handwritten_digits import load_images
from pipeline_task import Batch, Data
from pyparallel.pipeline import PooledHead


class Digits:
    """A small convolutional net on digits."""

    num_layers = 4
    layers = "two convolutions and two linear layers"
    loss_unit, per_nat = "nats", 1.0
    item = "images"
    rates = {"sgd": 0.05, "adam": 3e-3, "adamw": 3e-3}  # noqa: RUF012  read only
    head = PooledHead(10)  # on the mean image

    def __init__(self, *, batch_size: int = 64) -> None:
        self.batch_size = self.step_items = batch_size

    def build(self) -> nn.Sequential:
        return build_net_to_cut()

    def read(self, device: torch.device | None, seed: int, microbatches: int) -> Data:
        train, held_out = load_images(device)
        size = f"{len(train[1]):,} images of digits, held out {len(held_out[1])}"
        return Data(self._draw(train, seed), held_out, size)

    def _draw(self, train: Batch, seed: int) -> Iterator[Batch]:
        """Yield random images, the same on all ranks; the trainer uses what its stages need."""
        images, labels = train
        generator = torch.Generator().manual_seed(seed)
        while True:
            batch = torch.randint(len(labels), (self.batch_size,), generator=generator)
            yield images[batch], labels[batch]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    @torch.no_grad()
    def accuracy(self, model: nn.Module, held_out: Batch) -> float | None:
        images, labels = held_out
        return float((model(images).argmax(1) == labels).float().mean())
