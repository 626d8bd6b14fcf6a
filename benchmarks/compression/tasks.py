"""What compare_compression.py trains: the data and models of compare_pipeline.py, undivided."""

from dataclasses import replace
from functools import partial

import torch

from benchmarks.pipeline_tasks import Bytes, Digits, MakeOptimizer, Task
from pyparallel.compression import DGC, Compressor

TASKS: tuple[Task, ...] = (
    Digits(
        "digits",
        partial(torch.optim.SGD, momentum=0.9),
        rates=(0.04,),
        main_rate=0.04,
        batch_size=64,
        updates=900,
    ),
    Bytes(
        "text",
        torch.optim.AdamW,
        rates=(6e-3,),
        main_rate=6e-3,
        batch_size=8,
        context=64,
        width=32,
        updates=1500,
    ),
)


def fitted(task: Task, compressor: Compressor | None) -> tuple[Compressor | None, MakeOptimizer]:
    """Both as they belong together: DGC keeps the momentum of SGD, and of no other optimizer."""
    if not isinstance(compressor, DGC):
        return compressor, task.make_optimizer
    if isinstance(task.make_optimizer, partial) and "momentum" in task.make_optimizer.keywords:
        kept = task.make_optimizer.keywords["momentum"]
        return replace(compressor, momentum=kept), partial(task.make_optimizer, momentum=0.0)
    return replace(compressor, momentum=0.0), task.make_optimizer
