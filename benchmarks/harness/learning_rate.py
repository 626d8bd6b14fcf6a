"""The learning-rate schedule of the comparisons."""

import math
from collections.abc import Iterable, Mapping

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def rate(step: int, steps: int, warm_up: float = 0.05) -> float:
    """Return the factor on lr: linear warm-up over a fraction of the steps, cosine decay to 5 %."""
    rising = (step + 1) / (steps * warm_up)
    return min(rising, 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)


def decayed(optimizer: Optimizer, steps: int, warm_up: float = 0.05) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: rate(min(step, steps), steps, warm_up))


def next_rate(losses: Mapping[float, float]) -> float | None:
    """Return half or double the best of the tried rates if that is at an end of them, else None."""
    best = min(losses, key=losses.__getitem__)
    if best == min(losses):
        return best / 2
    return best * 2 if best == max(losses) else None


def set_rate(optimizers: Iterable[Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
