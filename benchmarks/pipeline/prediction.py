"""The cost of weight prediction: a stage's update with it and without."""

import random
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.pipeline.limit import StageAlone
from benchmarks.pipeline.models import ByteModel
from benchmarks.pipeline.systems import make_optimizer
from benchmarks.pipeline.turns import slowest
from pyparallel.comm import FlatBuckets
from pyparallel.pipeline import PipeOptim

PASSES = "forward and backward"
TORCH, UPDATE, PREDICTING = "torch's fused update", "update", "update with prediction"
DIFFERENCE = "the prediction: the difference"


def measure(rank: int, model: ByteModel, microbatches: int) -> dict[str, list[float]]:
    """Return the seconds of each on the slowest rank, by microbatch.

    Each update follows a forward and a backward, so that the caches are as in training.
    """
    alone = StageAlone(model)
    updates = make_updates(alone)
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


def make_updates(alone: StageAlone) -> dict[str, Callable[[], None]]:
    """Return the updates of one stage that are compared."""
    optimizer = make_optimizer(alone.stage.parameters())
    flat = [FlatBuckets(group["params"], 1 << 62) for group in optimizer.param_groups]
    predictor = PipeOptim().prediction.attach(optimizer, flat)
    out = [torch.empty_like(buffer) for buckets in flat for buffer in buckets.buffers]
    return {
        TORCH: optimizer.step,
        UPDATE: predictor.step,
        PREDICTING: lambda: predictor.step(1, out),
    }


def timed(function: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin
