"""The cost of weight prediction: a stage's update with it and without."""

import random
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from benchmarks.pipeline.limit import StageAlone
from benchmarks.pipeline.models import NUM_BYTES, ByteModel
from benchmarks.pipeline.systems import make_optimizer
from benchmarks.pipeline.turns import slowest
from pyparallel.pipeline import PipelineShape, PipeOptim
from pyparallel.pipeline.runtime.build_stage import attach_predictors

PASSES = "forward and backward"
UPDATE, PREDICTING = "update", "update with prediction"
DIFFERENCE = "the prediction: the difference"


def adamw(stage: nn.Module) -> list[Optimizer]:
    """Return torch's fused AdamW."""
    return [make_optimizer(stage.parameters())]


def muon(stage: nn.Module) -> list[Optimizer]:
    """Return Muon for the matrices of the blocks, torch's fused AdamW for the rest."""
    matrices = [p for p in stage.parameters() if p.ndim == 2 and NUM_BYTES not in p.shape]
    chosen = set(map(id, matrices))
    rest = [parameter for parameter in stage.parameters() if id(parameter) not in chosen]
    return [torch.optim.Muon(matrices, lr=1e-4, weight_decay=0.01), make_optimizer(rest)]


OPTIMIZERS = {"AdamW": adamw, "Muon and AdamW": muon}


def measure(rank: int, model: ByteModel, microbatches: int, kind: str) -> dict[str, list[float]]:
    """Return the seconds of each on the slowest rank, by microbatch.

    Each update follows a forward and a backward, so that the caches are as in training.
    """
    alone = StageAlone(model)
    updates = make_updates(alone, OPTIMIZERS[kind](alone.stage))
    seconds: dict[str, list[float]] = {name: [] for name in (PASSES, *updates)}
    order = random.Random(0)
    for _ in range(microbatches):
        for name in order.sample(list(updates), len(updates)):
            dist.barrier()
            seconds[PASSES].append(timed(lambda: alone.backward(alone.forward())))
            seconds[name].append(timed(updates[name]))
    warm = {name: slowest(times[len(times) // 4 :]) for name, times in seconds.items()}
    pairs = zip(warm[PREDICTING], warm[UPDATE], strict=True)
    return {**warm, DIFFERENCE: [predicting - update for predicting, update in pairs]}


def make_updates(alone: StageAlone, optimizers: list[Optimizer]) -> dict[str, Callable[[], None]]:
    """Return the updates of one stage that are compared."""
    flat, predictor = attach_predictors(optimizers, PipeOptim(), PipelineShape(2, 1, 2), 0)
    out = [torch.empty_like(buffer) for buckets in flat for buffer in buckets.buffers]

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return {UPDATE: update, PREDICTING: lambda: predictor.step(1, out)}


def timed(function: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin
