"""``python -m benchmarks.gossip.outer_steps [--tasks bytes] [--algorithms ddp] [--seeds 0]``.

A byte model of 208,000 parameters, for 1,200 steps or five times as many, and Hugging Face's GPT-2
of 10.8 million, on four gloo processes with a thread each, behind links of a limited rate: DDP with
AdamW or Muon, and outer steps every 12 local steps (streaming DiLoCo: 50). All see as many tokens
of a task, each at the best of its rates by the first seed. The loss of DDP does not depend on the
link: that of the longer tasks is behind a fast one.
Rows: ``benchmarks/results/outer-steps.csv``.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Muon, Optimizer

from benchmarks.gossip.table import outer_steps
from benchmarks.gossip.tasks import Text
from benchmarks.harness.learning_rate import decayed
from benchmarks.harness.link import limited_links
from benchmarks.harness.program import compare, prepare_for_ranks
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.rows import RESULTS, Key, Row, RunRows, as_text, shorten
from benchmarks.language_models.training import build_gpt2
from examples.data import draw_windows
from examples.models import build_transformer, byte_loss
from pyparallel import GossipDataParallel
from pyparallel.compression import Cast, ErrorFeedback, PerParameter, Statistical
from pyparallel.gossip import (
    Algorithm,
    AllReduce,
    DiLoCo,
    MuLoCo,
    NoLoCo,
    SparseLoCo,
    StreamingDiLoCo,
)

FIELDS = [
    "task", "link", "algorithm", "rate", "seed", "options", "parameters", "ranks", "steps", "score",
    "bits_per_parameter", "waiting", "hidden", "seconds", "torch", "commit", "losses",
]  # fmt: skip
RANKS, INTERVAL = 4, 12
SECONDS = 3600  # a run's limit
LINKS = {"100 Mbit/s": 100, "20 Mbit/s": 20}
FAST = "1 Gbit/s"

# The paper's: norms and embeddings are not quantized.
MULOCO = PerParameter({
    **dict.fromkeys(("0.*", "*before_*", "4.0.*", "*.bias", "*w[tp]e.*", "*ln_*"), Cast()),
    "*": ErrorFeedback(Statistical(2), decay=0.9),
})  # fmt: skip


class Logits(nn.Module):
    """A language model of Hugging Face that returns a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids, use_cache=False).logits
        return logits


@dataclass(frozen=True)
class Task:
    """What is trained: windows of 128 bytes, ``batch`` on each rank; Muon has ``matrices``."""

    build: Callable[[], nn.Module]
    matrices: tuple[str, ...]  # how their names begin
    batch: int
    steps: int
    rates: list[float]
    link_of_ddp: str | None = None


def transformer() -> nn.Module:
    return build_transformer(128, width=64, num_layers=3, num_heads=4)


def gpt2() -> nn.Module:
    return Logits(build_gpt2(128))


BLOCKS = ("1.", "2.", "3.")
TASKS = {
    # With 0.01 DDP with AdamW, DiLoCo and streaming DiLoCo end higher.
    "bytes": Task(transformer, BLOCKS, 4, 1200, [2e-2]),
    "bytes-long": Task(transformer, BLOCKS, 4, 6000, [1e-2], FAST),
    "GPT-2": Task(gpt2, ("model.transformer.h.",), 1, 400, [1e-3], FAST),
}


def pairs(**options: object) -> NoLoCo:
    return NoLoCo(interval=INTERVAL, **options)


def less_momentum(parameters: list[torch.Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.5, nesterov=True)


def plain(parameters: list[torch.Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


# Outer optimizers: the papers' are for runs of more outer steps; others ended lower here.
ALGORITHMS: dict[str, tuple[str, Callable[[], Algorithm]]] = {
    "ddp": ("AdamW", AllReduce),
    "ddp-muon": ("Muon", AllReduce),
    "diloco": ("AdamW", lambda: DiLoCo(INTERVAL)),
    "streaming": ("AdamW", lambda: StreamingDiLoCo(50, less_momentum)),
    "sparseloco": ("AdamW", lambda: SparseLoCo(INTERVAL, plain)),
    "muloco": ("Muon", lambda: MuLoCo(INTERVAL, less_momentum, compressor=MULOCO)),
    "noloco": ("AdamW", pairs),
    "noloco-sparse": ("AdamW", lambda: pairs(compressor=SparseLoCo().compressor)),
    "noloco-muon": ("Muon", lambda: pairs(compressor=MULOCO)),
}


@dataclass(frozen=True)
class Run:
    """One training run."""

    task: str
    link: str
    algorithm: str
    rate: float
    seed: int
    steps: int = 0  # 0: the task's

    @property
    def key(self) -> Key:
        return self.task, self.link, self.algorithm, f"{self.rate:g}", str(self.seed)


def optimizers(
    model: nn.Module, kind: str, rate: float, blocks: tuple[str, ...]
) -> list[Optimizer]:
    """Return AdamW, or Muon for the blocks' matrices and AdamW for the rest."""
    named = list(model.named_parameters())
    of_muon = blocks if kind == "Muon" else ()
    matrices = [p for name, p in named if p.ndim == 2 and name.startswith(of_muon)]
    others = [p for _, p in named if all(p is not each for each in matrices)]
    found: list[Optimizer] = [AdamW(others, rate, betas=(0.9, 0.95), weight_decay=0.1)]
    if matrices:
        found.append(Muon(matrices, rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    return found


def train(rank: int, run: Run) -> Row:
    torch.manual_seed(run.seed)
    task = TASKS[run.task]
    steps = run.steps or task.steps
    text, module = Text(run.seed, steps), task.build()
    kind, make = ALGORITHMS[run.algorithm]
    all_optimizers = optimizers(module, kind, run.rate, task.matrices)
    schedulers = [decayed(each, steps) for each in all_optimizers]
    model = GossipDataParallel(module, all_optimizers, make())
    draw = torch.Generator().manual_seed(run.seed * 1000 + rank)
    waiting, losses, begin = 0.0, [], time.perf_counter()
    for _ in range(steps):
        windows = draw_windows(text.mine, task.batch, 129, draw)
        loss = byte_loss(model(windows[:, :-1]), windows[:, 1:])
        loss.backward()
        clip_grad_norm_(module.parameters(), 1.0)
        for each in all_optimizers:
            each.step()
        for each in schedulers:
            each.step()
        model.zero_grad()
        waiting += model.metrics()["rank/waiting_seconds"]
        losses.append(loss.item())
    seconds, measured = time.perf_counter() - begin, model.metrics()
    with model.consensus() as averaged:
        score = text.score(averaged) if rank == 0 else math.nan
    return {
        "options": repr(model.algorithm),
        "steps": steps,
        "parameters": sum(each.numel() for each in module.parameters()),
        "score": score,
        "bits_per_parameter": measured["rank/bits_per_parameter"],
        "waiting": waiting / seconds,
        "hidden": measured["rank/hidden_seconds"] / seconds,
        "seconds": seconds,
        "losses": losses,
    }


def perform(run: Run) -> Row:
    with limited_links(RANKS, (LINKS | {FAST: 1000})[run.link]) as place:
        ranks = run_ranks(RANKS, place, SECONDS, train, run)
    first, shares = ranks[0], ("waiting", "hidden")
    means = {name: statistics.fmean(each[name] for each in ranks) for name in shares}
    return {
        "options": first["options"],
        "parameters": first["parameters"],
        "ranks": RANKS,
        "steps": first["steps"],
        "score": f"{first['score']:.5f}",
        "bits_per_parameter": f"{first['bits_per_parameter']:.4f}",
        "seconds": f"{first['seconds']:.1f}",
        **{name: f"{share:.4f}" for name, share in means.items()},
        "losses": as_text(shorten([each["losses"] for each in ranks])),
    }


def find_runs(options: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs that search each one's rate at the first link, and the others at the best."""
    first, *seeds = options.seeds
    for name, algorithm in product(options.tasks, options.algorithms):
        task, links = TASKS[name], options.links
        if ALGORITHMS[algorithm][1] is AllReduce and task.link_of_ddp:
            links = [task.link_of_ddp]
        tried = {rate: Run(name, links[0], algorithm, rate, first) for rate in task.rates}
        yield from tried.values()
        rows = RunRows(options.out, FIELDS, num_keys=5).read()
        best = min(task.rates, key=lambda rate: float(rows[tried[rate].key]["score"]))
        for link in links:
            for seed in seeds if link == links[0] else [first]:
                yield Run(name, link, algorithm, best, seed)


if __name__ == "__main__":
    prepare_for_ranks()
    rows = RunRows(RESULTS / "outer-steps.csv", FIELDS, num_keys=5)
    choices = {"tasks": list(TASKS), "links": list(LINKS), "algorithms": list(ALGORITHMS)}
    compare(
        "gossip.outer_steps", __doc__, rows, find_runs, perform, outer_steps, [0, 1, 2], **choices
    )
