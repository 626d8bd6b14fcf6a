"""``python -m benchmarks.language_models.recipes [--links ...] [--methods ...] [--seeds 0]``.

What does each recipe of ``examples/language_model.py`` make of 20 seconds? A Llama of 0.9
million parameters on Python's source text: four gloo ranks of one thread, each in a network
namespace of its own, on links of three rates. All train for as many seconds, on 8 windows of 128
bytes a rank and step, or a pipeline of four stages on 32 as eight microbatches; the learning rate
is that of the recipe, after its warm-up. ``torch 1F1B`` is ``torch.distributed.pipelining`` with
the same stages, its gradients clipped by stage. The held-out loss is that of the ranks' average.

Rows go to ``benchmarks/results/recipes.csv``; those that are there are kept.
"""

import argparse
import importlib
import math
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import product, starmap
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.harness.libraries import load
from benchmarks.harness.link import Rendezvous, limited_links
from benchmarks.harness.program import compare, prepare_for_ranks
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.rows import RESULTS, Row, RunRows, machine
from benchmarks.language_models.table import by_link
from benchmarks.language_models.training import BITS_PER_NAT, next_token_loss
from pyparallel.pipeline import split_model

FIELDS = [
    "link", "method", "seed", "ranks", "parameters", "window", "batch", "limit_seconds", "steps",
    "seconds", "tokens_per_second", "bits_per_parameter", "training_bits", "held_out_bits",
    "machine", "torch", "transformers", "commit",
]  # fmt: skip
RANKS, WINDOWS, SECONDS = 4, 8, 20  # windows of a rank and step
LINKS = {"10 Mbit/s": 10, "100 Mbit/s": 100, "1000 Mbit/s": 1000}
TORCH = "torch 1F1B"
METHODS = ["ddp", "compressed", "gossip", "diloco", TORCH, "pipeline", "mesh"]
PIPELINES = {TORCH, "pipeline", "mesh"}
COMMON = {"model": "llama", "steps": 2000, "warm_up": 0.01}  # a rate that hardly falls


def example(name: str) -> Any:
    """Import a file of the examples, which import each other as scripts of one folder do."""
    folder = str(Path(__file__).parents[2] / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    load("transformers")
    return importlib.import_module(name)


class TorchPipeline:
    """Torch's 1F1B in the place of ours, with the interface of the recipes' methods."""

    replica = 0

    def __init__(self, model: nn.Module, recipe: Any) -> None:
        layers, rank, ranks = split_model(model), dist.get_rank(), dist.get_world_size()
        bounds = [stage * len(layers) // ranks for stage in range(ranks + 1)]
        self.own = range(bounds[rank], bounds[rank + 1])
        self.module = nn.Sequential(*(layers[index] for index in self.own))
        stage = PipelineStage(self.module, rank, ranks, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, recipe.microbatches, loss_fn=next_token_loss)
        methods = example("methods")
        self.optimizer = methods.make_optimizer(recipe, self.module.parameters())
        self.scheduler = methods.make_scheduler(recipe, self.optimizer)
        self.layers = layers

    def step(self, ids: Tensor) -> float | None:
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        losses: list[Tensor] | None = [] if rank == last else None
        inputs, target = [ids] if rank == 0 else [], ids if rank == last else None
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return None if losses is None else float(torch.stack(losses).detach().mean())

    def metrics(self) -> dict[str, float]:
        return {}  # torch does not count bytes

    def whole_state(self) -> dict[str, Tensor]:
        parts: list[Any] = [None] * dist.get_world_size()
        own = {index: self.layers[index].state_dict() for index in self.own}
        dist.all_gather_object(parts, own)
        for index, state in (item for part in parts for item in part.items()):
            self.layers[index].load_state_dict(state)
        return self.layers.model.state_dict()


def train(rank: int, method: str, seed: int, limit: float) -> Row | None:
    """Train for some seconds; return the columns of the row on rank 0, else None."""
    script, recipes = example("language_model"), example("recipe")
    name = "pipeline" if method == TORCH else method
    recipe = recipes.Recipe(**recipes.read(recipes.FOLDER / f"{name}.toml") | COMMON)
    ranks, replicas = dist.get_world_size(), recipe.replicas if method == "mesh" else 1
    windows = WINDOWS * (ranks // replicas if method in PIPELINES else 1)
    microbatches = 8 // replicas if method in PIPELINES else recipe.microbatches
    recipe = replace(recipe, batch=windows, microbatches=microbatches)
    corpus = script.Corpus(recipe)
    torch.manual_seed(seed)
    model: Any = script.build_model(recipe, corpus.vocabulary)
    size = sum(each.numel() for each in model.parameters())
    make = TorchPipeline if method == TORCH else example("methods").METHODS[recipe.method]
    training = make(model, recipe)
    draw = torch.Generator().manual_seed(seed + 1000 * training.replica)
    losses: list[float] = []
    steps, begin, ended = 0, time.perf_counter(), torch.zeros(1)
    while not ended:
        for _ in range(2 if steps < 20 else 10):
            loss = training.step(script.draw_windows(corpus.train, windows, recipe.context, draw))
            losses += [] if loss is None else [loss]
            steps += 1
        ended.fill_(time.perf_counter() - begin > limit)
        dist.all_reduce(ended, op=dist.ReduceOp.MAX)  # all take as many steps
    seconds = time.perf_counter() - begin
    metrics = training.metrics()
    sent = metrics.get("rank/bytes_sent", math.nan)
    sent += metrics.get("rank/bytes_sent_to_replicas", 0.0)
    state = training.whole_state()
    of_ranks: list[Any] = [None] * ranks
    dist.all_gather_object(of_ranks, (losses[len(losses) * 9 // 10 :], sent))
    if rank:
        return None
    model = script.build_model(recipe, corpus.vocabulary)
    model.load_state_dict(state)
    with torch.no_grad():
        logits = model.eval()(corpus.held_out).logits
    ends = [loss for own, _ in of_ranks for loss in own]
    bits = 8 * statistics.fmean(sent for _, sent in of_ranks) / (size * steps)
    held_out = next_token_loss(logits, corpus.held_out).item()
    return {
        "ranks": ranks,
        "parameters": size,
        "window": recipe.context,
        "batch": WINDOWS * ranks,
        "limit_seconds": f"{limit:g}",
        "steps": steps,
        "seconds": f"{seconds:.1f}",
        "tokens_per_second": f"{steps * WINDOWS * ranks * recipe.context / seconds:.0f}",
        "bits_per_parameter": "" if math.isnan(bits) else f"{bits:.3f}",
        "training_bits": f"{statistics.fmean(ends) * BITS_PER_NAT:.4f}",
        "held_out_bits": f"{held_out * BITS_PER_NAT:.4f}",
        "transformers": load("transformers").__version__,
    }


class Run(NamedTuple):
    """One training."""

    link: str
    method: str
    seed: int
    seconds: float = SECONDS

    @property
    def key(self) -> tuple[str, ...]:
        return self.link, self.method, str(self.seed)


def find_runs(options: argparse.Namespace) -> Iterator[Run]:
    yield from starmap(Run, product(options.links, options.methods, options.seeds))


def perform(run: Run, place: AbstractContextManager[Rendezvous] | None = None) -> Row:
    with place or limited_links(RANKS, LINKS[run.link]) as at:
        limit = 240 + 6 * run.seconds
        row, *_ = run_ranks(RANKS, at, limit, train, run.method, run.seed, run.seconds)
    return {**row, "machine": machine()}


if __name__ == "__main__":
    prepare_for_ranks()
    rows = RunRows(RESULTS / "recipes.csv", FIELDS, num_keys=3)
    choices = {"links": list(LINKS), "methods": METHODS}
    compare("language_models.recipes", __doc__, rows, find_runs, perform, by_link, [0], **choices)
