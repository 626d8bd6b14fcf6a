"""``python -m benchmarks.language_models.start [--seeds ...] [--again]``.

How long must the synchronous start of ``PipeOptim`` be? Hugging Face's GPT-2 of a million
parameters, its embedding tied to the head, in two stages of one process, whose updates are those of
two ranks: AdamW, 200 updates, each from 8 windows of 64 bytes of Python's standard library, warm-up
over the first tenth, cosine decay; with and without clipping. ``OneForwardOneBackward``, whose
updates are all synchronous, is what the others are compared with.

Rows go to ``benchmarks/results/synchronous-start.csv``; those that are there are kept.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import islice, product
from typing import Any, NamedTuple

import torch
from torch.optim import AdamW

from benchmarks.harness.learning_rate import decayed
from benchmarks.harness.libraries import load
from benchmarks.harness.program import compare
from benchmarks.harness.rows import RESULTS, Row, RunRows
from benchmarks.language_models.bench import (
    BATCH,
    BITS_PER_NAT,
    COMMON,
    RATE,
    WARM_UP,
    batches,
    next_token_loss,
)
from benchmarks.language_models.table import by_start
from benchmarks.pipeline.tasks import load_text
from examples.data import cut_windows
from pyparallel.pipeline import (
    OneForwardOneBackward,
    PipelineTrainer,
    PipeOptim,
    Schedule,
    split_model,
)

FIELDS = [
    "schedule", "start", "clip", "seed", "rate", "parameters", "batch", "length", "steps",
    "held_out_bits", "torch", "transformers", "commit",
]  # fmt: skip
LENGTH, HELD_OUT, STEPS = 64, 64, 200
STARTS = [0, 10, 20, 50, 100]
SPLIT = [3]  # the embedding and two of four blocks


class Run(NamedTuple):
    """One training; ``start`` is "all" where every update is synchronous."""

    schedule: str
    start: str
    clip: str
    seed: int

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(map(str, self))


def find_runs(options: argparse.Namespace) -> Iterator[Run]:
    starts = [("OneForwardOneBackward", "all"), *(("PipeOptim", str(start)) for start in STARTS)]
    for seed, clip, (schedule, start) in product(options.seeds, ("", "1.0"), starts):
        yield Run(schedule, start, clip, seed)


def perform(run: Run) -> Row:
    transformers = load("transformers")
    torch.manual_seed(run.seed)
    sizes = {"n_positions": LENGTH, "n_embd": 144, "n_layer": 4, "n_head": 4}
    undropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: Any = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**COMMON, **sizes, **undropped)
    )
    schedule: Schedule = OneForwardOneBackward()
    if run.start != "all":
        schedule = PipeOptim(synchronous_updates=int(run.start))
    trainer = PipelineTrainer(
        split_model(model),
        next_token_loss,
        partial(AdamW, lr=RATE),
        schedule,
        num_microbatches=1,
        split=SPLIT,
        scheduler_fn=partial(decayed, steps=STEPS, warm_up=WARM_UP),
        max_norm=float(run.clip) if run.clip else None,
    )
    for ids in islice(batches(run.seed, LENGTH), STEPS):
        trainer.step(ids, target=ids)
    held_out = cut_windows(load_text()[1], HELD_OUT, LENGTH)
    bits = trainer.evaluate(held_out, target=held_out)
    assert bits is not None  # the last stage is in this process
    return {
        "rate": f"{RATE:g}",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "batch": BATCH,
        "length": LENGTH,
        "steps": STEPS,
        "held_out_bits": f"{bits * BITS_PER_NAT:.5f}",
        "transformers": transformers.__version__,
    }


def main() -> None:
    rows = RunRows(RESULTS / "synchronous-start.csv", FIELDS, num_keys=4)
    module = "language_models.start"
    compare(module, __doc__, rows, find_runs, perform, by_start, range(3))


if __name__ == "__main__":
    main()
