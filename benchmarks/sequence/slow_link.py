"""``python -m benchmarks.sequence.slow_link [--methods ...] [--links ...] [--seeds 0]``.

How long is a step, and what is learned, if a sequence lies on two ranks behind a slow link? A small
Llama of transformers on Python's source text, a window of 4,096 bytes a step, cut in zig-zag over
two gloo ranks of one thread, each in a network namespace of its own. ``ring_attention`` sends keys
and values as float32, or as 8 bits; the peer gathers them from all ranks, for torch's
``scaled_dot_product_attention``. DistributedDataParallel averages the gradients.

Rows go to ``benchmarks/results/ring-attention.csv``; those that are there are kept.
"""

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from functools import partial
from itertools import product, starmap
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.libraries import load
from benchmarks.harness.link import limited_links
from benchmarks.harness.program import compare, prepare_for_ranks
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.rows import RESULTS, Row, RunRows, machine
from benchmarks.pipeline.tasks import load_text
from benchmarks.sequence.table import by_method
from examples.data import draw_windows
from pyparallel.comm import CommStats
from pyparallel.compression import Int8
from pyparallel.sequence import ring_attention, zigzag_split

FIELDS = [
    "link", "method", "seed", "ranks", "parameters", "window", "steps", "step_ms", "mb_per_step",
    "training_bits", "machine", "torch", "transformers", "commit",
]  # fmt: skip
RANKS, WINDOW, STEPS = 2, 4096, 300
LINKS = {"100 Mbit/s": 100}
GATHER = "all-gather, float32"
METHODS = {"ring, float32": None, "ring, Int8": Int8(), GATHER: None}
SIZES = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2}


class Run(NamedTuple):
    """One training."""

    link: str
    method: str
    seed: int
    steps: int = STEPS
    window: int = WINDOW

    @property
    def key(self) -> tuple[str, ...]:
        return self.link, self.method, str(self.seed)


def find_runs(options: argparse.Namespace) -> Iterator[Run]:
    yield from starmap(Run, product(options.links, options.methods, options.seeds))


def by_ring(method: str, stats: CommStats, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ring_attention(q, k, v, causal="zigzag", compressor=METHODS[method], stats=stats)


def by_all_gather(stats: CommStats, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to the gathered keys and values, of which later places are masked."""
    from torch.distributed.nn.functional import all_gather

    size, rank = dist.get_world_size(), dist.get_rank()
    parts = all_gather(torch.stack([k, v]))
    keys, values = torch.cat(parts, dim=3).unbind()
    places = torch.arange(size * q.shape[2])
    by_rank = [zigzag_split(places, each, size, dim=0) for each in range(size)]
    mask = by_rank[rank][:, None] >= torch.cat(by_rank)
    sent = 2 * (size - 1) * k.numel() * k.element_size()
    stats.count_bytes(2 * sent)  # and as many for the gradients
    return scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def build(window: int, attend: Any) -> Any:
    """Return a Llama whose attention is a function of q, k and v."""
    transformers = load("transformers")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> Any:
        return attend(q, k, v).transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("of_all_ranks", attention)
    heads = {"num_attention_heads": 2, "max_position_embeddings": window}
    tokens = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    config = transformers.LlamaConfig(**SIZES, **heads, **tokens)
    config._attn_implementation = "of_all_ranks"
    return transformers.LlamaForCausalLM(config)


def train(rank: int, run: Run) -> Row:
    """Train; return the columns of this rank."""
    stats = CommStats()
    attend = by_all_gather if run.method == GATHER else partial(by_ring, run.method)
    torch.manual_seed(run.seed)
    module = build(run.window, partial(attend, stats))
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text, draw = load_text()[0], torch.Generator().manual_seed(run.seed)
    places = torch.arange(run.window)[None]
    seconds, losses = [], []
    for step in range(run.steps):
        ids = draw_windows(text, 1, run.window + 1, draw)
        whole = ids[:, :-1], ids[:, 1:], places
        own, targets, own_places = (zigzag_split(each, rank, RANKS, dim=1) for each in whole)
        dist.barrier()
        begin = time.perf_counter()
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 20)
        optimizer.zero_grad()
        logits = model(own, position_ids=own_places, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    return {
        "parameters": sum(each.numel() for each in module.parameters()),
        "seconds": statistics.median(seconds),
        "bytes": stats.wire_bytes / run.steps,
        "loss": statistics.fmean(losses[-max(1, run.steps // 10) :]),
        "transformers": load("transformers").__version__,
    }


def perform(run: Run, place: Any = None) -> Row:
    with place or limited_links(RANKS, LINKS[run.link]) as at:
        found = run_ranks(RANKS, at, 60 + 20 * run.steps, train, run)
    return {
        "ranks": RANKS,
        "parameters": found[0]["parameters"],
        "window": run.window,
        "steps": run.steps,
        "step_ms": f"{1e3 * max(each['seconds'] for each in found):.1f}",
        "mb_per_step": f"{statistics.fmean(each['bytes'] for each in found) / 1e6:.3f}",
        "training_bits": f"{statistics.fmean(each['loss'] for each in found) / math.log(2):.4f}",
        "machine": machine(),
        "transformers": found[0]["transformers"],
    }


if __name__ == "__main__":
    prepare_for_ranks()
    rows = RunRows(RESULTS / "ring-attention.csv", FIELDS, num_keys=3)
    choices = {"links": list(LINKS), "methods": list(METHODS)}
    compare("sequence.slow_link", __doc__, rows, find_runs, perform, by_method, [0], **choices)
