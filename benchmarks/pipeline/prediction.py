"""The cost of weight prediction: a stage's update with it and without."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from benchmarks.harness.turns import slowest, take_turns, timed
from benchmarks.pipeline.limit import StageAlone
from benchmarks.pipeline.models import NUM_BYTES, ByteModel
from benchmarks.pipeline.systems import make_optimizer
from pyparallel.pipeline import PipelineShape, PipeOptim
from pyparallel.pipeline.runtime.build_stage import attach_predictors

PASSES = "forward and backward"
UPDATE, PREDICTING = "update", "update with prediction"
DIFFERENCE = "the prediction: the difference"


def adamw(stage: nn.Module) -> list[Optimizer]:
    return [make_optimizer(stage.parameters())]


def muon(stage: nn.Module) -> list[Optimizer]:
    """Return Muon for the matrices of the blocks, torch's fused AdamW for the rest."""
    matrices = [p for p in stage.parameters() if p.ndim == 2 and NUM_BYTES not in p.shape]
    chosen = set(map(id, matrices))
    rest = [parameter for parameter in stage.parameters() if id(parameter) not in chosen]
    return [torch.optim.Muon(matrices, lr=1e-4, weight_decay=0.01), make_optimizer(rest)]


OPTIMIZERS = {"AdamW": adamw, "Muon and AdamW": muon}


def measure(rank: int, model: ByteModel, microbatches: int, kind: str) -> dict[str, list[float]]:
    """Return the seconds of each on the slowest rank, by microbatch; a quarter more warms up.

    Each update follows a forward and a backward, so that the caches are as in training.
    """
    alone = StageAlone(model)
    optimizers = OPTIMIZERS[kind](alone.stage)
    flat, predictor = attach_predictors(optimizers, PipeOptim(), PipelineShape(2, 1, 2), 0)
    out = [torch.empty_like(buffer) for buckets in flat for buffer in buckets.buffers]

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()

    def after_passes(function: Callable[[], object]) -> tuple[float, float]:
        passes = timed(lambda: alone.backward(alone.forward()))
        return passes, timed(function)

    runs = {
        UPDATE: lambda: after_passes(update),
        PREDICTING: lambda: after_passes(lambda: predictor.step(1, out)),
    }
    found = take_turns(runs, microbatches, microbatches // 4, dist.barrier)
    seconds = {name: [own for _, own in pairs] for name, pairs in found.items()}
    passes = [passes for pairs in found.values() for passes, _ in pairs]
    warm = slowest({PASSES: passes, **seconds})
    differences = zip(warm[PREDICTING], warm[UPDATE], strict=True)
    return {**warm, DIFFERENCE: [predicting - update for predicting, update in differences]}
