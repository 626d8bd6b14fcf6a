"""``python -m benchmarks.language_models.compare [--models ...] [--rates ...] [--again]``.

Do streaming pipelines train Hugging Face's models as well as synchronous updates do? GPT-2, its
embedding tied to the head, and Llama, each of 10 million parameters, from random weights, over
gloo: in two stages and in four, a rank with one thread each. 1,000 updates of AdamW, or of Muon for
the matrices of the blocks and AdamW for the rest, each from 8 windows of 64 bytes of Python's
standard library; gradients are clipped, the learning rate warms up over the first tenth and decays
as a cosine, and the streaming schedules begin with a tenth or three of synchronous updates. All
runs of a seed have the same initial weights and batches. ``OneForwardOneBackward``, whose updates
are those of the unsplit model, has rows of two stages only.

Rows go to ``benchmarks/results/language-models.csv``; those that are there are kept.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from benchmarks.harness.learning_rate import decayed
from benchmarks.harness.libraries import load
from benchmarks.harness.program import compare
from benchmarks.harness.ranks import run_on_loopback
from benchmarks.harness.rows import RESULTS, Row, RunRows, as_text, machine, shorten
from benchmarks.language_models.bench import (
    BATCH,
    BITS_PER_NAT,
    COMMON,
    MODELS,
    batches,
    next_token_loss,
)
from benchmarks.language_models.table import by_depth
from benchmarks.pipeline.tasks import load_text
from examples.data import cut_windows
from pyparallel import pipeline

FIELDS = [
    "model", "optimizer", "schedule", "ranks", "rate", "seed", "start", "parameters", "tied",
    "microbatches", "batch", "length", "steps", "training_bits", "held_out_bits", "losses",
    "seconds", "machine", "torch", "transformers", "commit",
]  # fmt: skip
LENGTH, HELD_OUT = 64, 128  # bytes of a window, held-out windows
STEPS, WARM_UP = 1000, 0.1
RATES = ["0.0005", "0.001", "0.002"]
STARTS = ["100", "300"]
OPTIMIZERS = ["AdamW", "Muon"]
SPLITS = {2: [4], 4: [2, 4, 6]}  # layer 0 is the embedding, the last the head; six blocks
SCHEDULES = ["OneForwardOneBackward", "PipeOptim", "PipeDream2BW"]


class Run(NamedTuple):
    """One training."""

    model: str
    optimizer: str
    schedule: str
    ranks: str
    rate: str
    seed: int
    start: str  # synchronous updates
    steps: int = STEPS

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(map(str, self[:-1]))


def find_runs(options: argparse.Namespace) -> Iterator[Run]:
    chosen = options.models, options.optimizers, options.schedules, options.ranks, options.rates
    for seed, run in product(options.seeds, product(*chosen)):
        if run[2] != "OneForwardOneBackward":
            yield from (Run(*run, seed=seed, start=each) for each in options.starts)
        elif run[3] == "2":
            yield Run(*run, seed=seed, start="0")


def schedule_of(run: Run) -> tuple[pipeline.Schedule, int]:
    """Return a schedule and the microbatches of an update's batch."""
    if run.schedule == "OneForwardOneBackward":
        return pipeline.OneForwardOneBackward(), 4
    if run.schedule == "PipeOptim":
        return pipeline.PipeOptim(synchronous_updates=int(run.start)), 1
    # With as many microbatches as stages every stage is one update late.
    prediction = pipeline.Displacement()
    schedule = pipeline.PipeDream2BW(prediction=prediction, synchronous_updates=int(run.start))
    return schedule, int(run.ranks)


def optimizers_of(
    name: str, rate: float, parameters: Sequence[nn.Parameter]
) -> Optimizer | list[Optimizer]:
    """Return AdamW, or Muon for the matrices of blocks beside it."""
    if name == "AdamW":
        return AdamW(parameters, lr=rate)
    tables = (COMMON["vocab_size"], LENGTH)  # rows of embeddings, and of the head
    matrices = [each for each in parameters if each.ndim == 2 and each.shape[0] not in tables]
    rest = [each for each in parameters if all(each is not other for other in matrices)]
    muon = Muon(matrices, lr=rate, adjust_lr_fn="match_rms_adamw")
    return [AdamW(rest, lr=rate), muon] if rest else [muon]


def train(rank: int, run: Run) -> Row | None:
    torch.manual_seed(run.seed)
    model: Any = MODELS[run.model](LENGTH)
    schedule, microbatches = schedule_of(run)
    trainer = pipeline.PipelineTrainer(
        pipeline.split_model(model),
        next_token_loss,
        partial(optimizers_of, run.optimizer, float(run.rate)),
        schedule,
        num_microbatches=microbatches,
        split=SPLITS[int(run.ranks)],
        scheduler_fn=partial(decayed, steps=run.steps, warm_up=WARM_UP),
        max_norm=1.0,
    )
    load_text()
    dist.barrier()
    begin = time.perf_counter()
    losses = [trainer.step(ids, target=ids) for ids in islice(batches(run.seed, LENGTH), run.steps)]
    trainer.flush()
    seconds = time.perf_counter() - begin
    held_out = cut_windows(load_text()[1], HELD_OUT, LENGTH)
    final = trainer.evaluate(held_out, target=held_out)
    if final is None:
        return None
    bits = [loss * BITS_PER_NAT for loss in losses if loss is not None]
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight,
        "microbatches": microbatches,
        "batch": BATCH,
        "length": LENGTH,
        "steps": run.steps,
        "training_bits": f"{statistics.fmean(bits[len(bits) * 9 // 10 :]):.5f}",
        "held_out_bits": f"{final * BITS_PER_NAT:.5f}",
        "losses": as_text(shorten([bits])),
        "seconds": f"{seconds:.1f}",
        "machine": machine(),
        "transformers": load("transformers").__version__,
    }


def perform(run: Run) -> Row:
    found: list[Row] = run_on_loopback(int(run.ranks), 60 + 20.0 * run.steps, train, run)
    return found[-1]


def main() -> None:
    rows = RunRows(RESULTS / "language-models.csv", FIELDS, num_keys=7)
    chosen = {"models": list(MODELS), "optimizers": OPTIMIZERS, "schedules": SCHEDULES}
    chosen |= {"ranks": [*map(str, SPLITS)], "rates": RATES, "starts": STARTS}
    module = "language_models.compare"
    compare(module, __doc__, rows, find_runs, perform, by_depth, range(3), **chosen)


if __name__ == "__main__":
    main()
