"""The learning rate from step to step, the same in all examples with text."""

import math

from pyparallel.pipeline import PipelineTrainer


def rate(step: int, steps: int) -> float:
    """What to multiply lr by: up within the first twentieth, then down along a cosine."""
    warm_up = (step + 1) / (steps / 20)
    return min(warm_up, 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)


def set_rate(trainer: PipelineTrainer, lr: float) -> None:
    """Of every stage of this rank; there are none before the first step."""
    for stage in trainer.stages:
        for group in stage.optimizer.param_groups:
            group["lr"] = lr
