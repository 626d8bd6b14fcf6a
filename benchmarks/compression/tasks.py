"""What compare_compression.py trains: the data and models of compare_pipeline.py, undivided."""

from functools import partial

import torch

from benchmarks.pipeline_tasks import Bytes, Digits, Task

TASKS: tuple[Task, ...] = (
    Digits(
        "digits",
        partial(torch.optim.SGD, momentum=0.9),
        rates=(0.04,),
        main_rate=0.04,
        batch_size=64,
        updates=600,
    ),
    Bytes(
        "text",
        torch.optim.AdamW,
        rates=(6e-3,),
        main_rate=6e-3,
        batch_size=32,
        context=64,
        width=32,
        updates=600,
    ),
)
