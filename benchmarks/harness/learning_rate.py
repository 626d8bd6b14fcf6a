"""The learning-rate schedule of the comparisons."""

import math
from collections.abc import Iterable

from torch.optim import Optimizer


def rate(step: int, steps: int) -> float:
    """Return the factor on lr: linear warm-up over the first twentieth, then cosine decay."""
    warm_up = (step + 1) / (steps / 20)
    return min(warm_up, 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)


def set_rate(optimizers: Iterable[Optimizer], lr: float) -> None:
    """Set the learning rate of all parameter groups."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
