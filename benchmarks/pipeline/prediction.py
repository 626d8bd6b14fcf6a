"""What foreseeing the weights adds to the work of a stage: the update with it, and without."""

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

UPDATE, FORESEEING = "update", "update that foresees"
TORCH = "torch's fused update"
PASSES = "forward and backward"


def measure(rank: int, model: ByteModel, microbatches: int) -> dict[str, list[float]]:
    """Seconds of each on the slowest rank, microbatch by microbatch.

    Every update follows a forward and a backward, which leave of the weights in the caches what
    they leave there in training.
    """
    alone = StageAlone(model)
    updates = make_updates(alone)
    seconds: dict[str, list[float]] = {name: [] for name in (PASSES, *updates)}
    order = random.Random(0)
    for _ in range(microbatches):
        for name in order.sample(list(updates), len(updates)):
            dist.barrier()
            seconds[PASSES].append(timed(alone.pass_through))
            seconds[name].append(timed(updates[name]))
    return {name: slowest(times[len(times) // 4 :]) for name, times in seconds.items()}


def make_updates(alone: StageAlone) -> dict[str, Callable[[], None]]:
    """Ways to update one stage, which take turns."""
    optimizer = make_optimizer(alone.stage.parameters())
    flat = [FlatBuckets(group["params"], 1 << 62) for group in optimizer.param_groups]
    foresight = PipeOptim().prediction.attach(optimizer, flat)
    room = [torch.empty_like(buffer) for buckets in flat for buffer in buckets.buffers]
    return {
        TORCH: optimizer.step,
        UPDATE: foresight.step,
        FORESEEING: lambda: foresight.step(1, room),
    }


def timed(function: Callable[[], object]) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin
