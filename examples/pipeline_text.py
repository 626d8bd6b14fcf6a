"""Text for train_pipeline.py: the bytes of Python's own standard library, no download."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from byte_transformer import build_transformer, byte_loss
from pipeline_task import Batch, Data
from pyparallel.pipeline import LinearHead
from standard_library import as_tensor, cut_windows, draw_windows, read_text_on_ranks

CONTEXT = 128  # bytes
HEADS = 4
NUM_WINDOWS = 256  # of the held-out bytes, evenly spaced, CONTEXT bytes each


class Text:
    """A small byte-level transformer."""

    loss_unit, per_nat = "bits per byte", 1 / math.log(2)
    item = "tokens (bytes)"
    rates = {"sgd": 0.1, "adam": 3e-3, "adamw": 3e-3}  # noqa: RUF012  read only
    head = LinearHead(256, norm=nn.LayerNorm)  # like the model's own

    def __init__(self, *, batch_size: int = 16, blocks: int = 4, width: int = 64) -> None:
        if width % HEADS:
            raise ValueError(
                f"--width must be a multiple of the {HEADS} heads of attention, got {width}"
            )
        self.batch_size = batch_size
        self.blocks = blocks
        self.width = width
        self.num_layers = blocks + 2
        self.layers = f"{blocks} blocks, an embedding and a head"
        self.step_items = batch_size * CONTEXT

    def build(self) -> nn.Sequential:
        return build_transformer(CONTEXT, self.width, self.blocks, HEADS)

    def read(self, device: torch.device | None, seed: int, microbatches: int) -> Data:
        text = read_text_on_ranks(files_needed=1)
        num_windows = max(NUM_WINDOWS, microbatches)
        windows = cut_windows(as_tensor(text.held_out, device), num_windows, CONTEXT + 1)
        return Data(self._draw(as_tensor(text.train, device), seed), next_bytes(windows), text.size)

    def _draw(self, text: Tensor, seed: int) -> Iterator[Batch]:
        """Yield random windows, the same on all ranks; the trainer uses what its stages need."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield next_bytes(draw_windows(text, self.batch_size, CONTEXT + 1, generator))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return byte_loss(output, target)

    def accuracy(self, model: nn.Module, held_out: Batch) -> float | None:
        return None


def next_bytes(windows: Tensor) -> Batch:
    """Split windows into inputs and the bytes that follow them."""
    return windows[:, :-1], windows[:, 1:]
