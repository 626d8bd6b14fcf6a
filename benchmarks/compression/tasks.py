"""Tasks of compare.py: data and models of the pipeline benchmarks, not partitioned."""

from dataclasses import replace
from functools import partial

import torch

from benchmarks.pipeline.tasks import Bytes, Digits, MakeOptimizer
from pyparallel.compression import (
    DGC,
    Cast,
    Chain,
    Compressor,
    ErrorFeedback,
    Int8,
    Learned,
    PermK,
    PowerSGD,
    RandomK,
    Sign,
    Switch,
    Ternary,
    TopK,
)
from pyparallel.recommend import CANDIDATES, Candidate

WARM_UP = 500  # steps, a third: AdamW divides by gradient statistics of the first steps


def _after_bf16(compressor: Compressor, steps: int = WARM_UP) -> Compressor:
    return Switch({0: Cast(), steps: compressor})


TASKS = (
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

# Aggressive compressors need a warm-up with an optimizer that adapts to every entry.
WARMED = (
    Candidate("sign-ef-warmed", _after_bf16(ErrorFeedback(Sign(block_size=64)))),
    Candidate("ternary-ef-warmed", _after_bf16(ErrorFeedback(Ternary(block_size=32)))),
    Candidate("topk-ef-warmed", _after_bf16(ErrorFeedback(TopK(0.05)))),
    Candidate("topk-int8-ef-warmed", _after_bf16(ErrorFeedback(Chain(TopK(0.05), Int8())))),
    Candidate("randomk-ef-warmed", _after_bf16(ErrorFeedback(RandomK(0.25)), 750)),
    Candidate("permk-ef-warmed", _after_bf16(ErrorFeedback(PermK()), 750)),
    Candidate("powersgd-ef-warmed", _after_bf16(ErrorFeedback(PowerSGD()))),
    Candidate("dgc-warmed", DGC(0.05, warm_up=WARM_UP)),
    Candidate(
        "learned-ef-warmed",
        ErrorFeedback(Learned(0.05, dense_steps=750, learning_steps=300)),
    ),
)

# A block that spans several parameters has a scale that suits none of them.
IN_SMALL_BLOCKS = (Candidate("sign-64-ef", ErrorFeedback(Sign(block_size=64))),)


def candidates_of(task: Digits | Bytes) -> tuple[Candidate, ...]:
    return CANDIDATES + (WARMED if isinstance(task, Bytes) else IN_SMALL_BLOCKS)


def fitted(
    task: Digits | Bytes, compressor: Compressor | None
) -> tuple[Compressor | None, MakeOptimizer]:
    """Return compressor and optimizer: DGC takes over the momentum of SGD, of no other."""
    if not isinstance(compressor, DGC):
        return compressor, task.make_optimizer
    if isinstance(task.make_optimizer, partial) and "momentum" in task.make_optimizer.keywords:
        kept = task.make_optimizer.keywords["momentum"]
        return replace(compressor, momentum=kept), partial(task.make_optimizer, momentum=0.0)
    return replace(compressor, momentum=0.0), task.make_optimizer
