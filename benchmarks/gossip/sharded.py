"""``python -m benchmarks.gossip.sharded [--links "100 Mbit/s"] [--methods HSDP] [--seeds 0]``.

Hugging Face's Llama of 10.8 million parameters, sharded by FSDP2 over the two ranks of a node: two
nodes behind links of a limited rate, each link shared by a node's ranks. Torch's HSDP averages
gradients between nodes by an all-reduce, of float32 or of bfloat16; gossip and outer steps take its
place. All see the same tokens, 200 steps of them, with AdamW at one rate. Bits are those that a
node's link has carried, of each of the model's parameters and step.
Rows: ``benchmarks/results/sharded.csv``.
"""

import resource
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import pyparallel.optim
from benchmarks.gossip.outer_steps import LINKS, Logits
from benchmarks.gossip.table import sharded
from benchmarks.gossip.tasks import Text
from benchmarks.harness.learning_rate import decayed
from benchmarks.harness.link import limited_links, read_sent
from benchmarks.harness.program import LinkRun, compare, find_link_runs, prepare_for_ranks
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.rows import RESULTS, Row, RunRows, as_text, shorten
from benchmarks.language_models.training import build_llama
from examples.data import draw_windows
from examples.models import byte_loss
from pyparallel import GossipDataParallel
from pyparallel.compression import Int8
from pyparallel.gossip import OSGP, SGP, Algorithm, DiLoCo, SparseLoCo

FIELDS = [
    "link", "method", "seed", "options", "parameters", "ranks", "steps", "rate", "score", "bits",
    "peak_mib", "seconds", "torch", "commit", "losses",
]  # fmt: skip
NODES, SHARDS, STEPS, INTERVAL = 2, 2, 200, 12
RATE = 1e-3
SECONDS = 3600  # a run's limit

# HSDP's precision, or an algorithm between replicas
METHODS: dict[str, MixedPrecisionPolicy | Algorithm] = {
    "HSDP": MixedPrecisionPolicy(),
    "HSDP, bfloat16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    "SGP, overlap=1": SGP(overlap=1),
    "SGP, overlap=1, Int8": SGP(overlap=1, compressor=Int8()),
    "OSGP": OSGP(),
    "DiLoCo": DiLoCo(INTERVAL),
    "SparseLoCo": SparseLoCo(INTERVAL),
}


def start(method: str) -> tuple[nn.Module, Optimizer, nn.Module]:
    """Return a sharded module, its optimizer, and what is trained: it or a wrapper."""
    mesh = init_device_mesh("cpu", (NODES, SHARDS), mesh_dim_names=("replicate", "shard"))
    module, chosen = Logits(build_llama(128)), METHODS[method]
    is_hsdp = isinstance(chosen, MixedPrecisionPolicy)
    options = {"mesh": mesh, "mp_policy": chosen} if is_hsdp else {"mesh": mesh["shard"]}
    for layer in module.model.model.layers:
        fully_shard(layer, **options)
    fully_shard(module, **options)
    kind = torch.optim.AdamW if is_hsdp else pyparallel.optim.AdamW
    optimizer = kind(module.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.1)
    if is_hsdp:
        return module, optimizer, module
    wrapped = GossipDataParallel(module, optimizer, chosen, mesh=mesh["replicate"])
    return module, optimizer, wrapped


def train(rank: int, run: LinkRun) -> Row:
    torch.manual_seed(run.seed)
    text = Text(run.seed, run.steps)
    module, optimizer, model = start(run.method)
    scheduler = decayed(optimizer, run.steps)
    draw = torch.Generator().manual_seed(run.seed * 1000 + rank)
    dist.barrier()
    losses, sent, begin = [], read_sent(), time.perf_counter()
    for _ in range(run.steps):
        windows = draw_windows(text.mine, 1, 129, draw)
        loss = byte_loss(model(windows[:, :-1]), windows[:, 1:])
        loss.backward()
        clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        model.zero_grad()
        losses.append(loss.item())
    dist.barrier()
    seconds, sent = time.perf_counter() - begin, read_sent() - sent
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    text.windows = text.windows.chunk(NODES * SHARDS)[rank]
    if isinstance(model, GossipDataParallel):
        with model.consensus() as averaged:
            score = torch.tensor(text.score(averaged))
        options = repr(model.algorithm)
    else:
        score, options = torch.tensor(text.score(model)), str(METHODS[run.method])
    dist.all_reduce(score)
    number = sum(each.numel() for each in module.parameters())
    return {
        "options": options,
        "parameters": number,
        "score": float(score) / (NODES * SHARDS),
        "bits": 8 * sent / number / run.steps,
        "peak_mib": peak,
        "seconds": seconds,
        "losses": losses,
    }


def perform(run: LinkRun) -> Row:
    ranks = NODES * SHARDS
    with limited_links(ranks, LINKS[run.link], SHARDS) as place:
        found = run_ranks(ranks, place, SECONDS, train, run)
    first = found[0]
    return {
        "options": first["options"],
        "parameters": first["parameters"],
        "ranks": ranks,
        "steps": run.steps,
        "rate": RATE,
        "score": f"{first['score']:.5f}",
        "bits": f"{statistics.fmean(each['bits'] for each in found):.4f}",
        "peak_mib": f"{max(each['peak_mib'] for each in found):.0f}",
        "seconds": f"{first['seconds']:.1f}",
        "losses": as_text(shorten([each["losses"] for each in found])),
    }


if __name__ == "__main__":
    prepare_for_ranks()
    rows = RunRows(RESULTS / "sharded.csv", FIELDS, num_keys=3)
    choices = {"links": list(LINKS), "methods": list(METHODS)}
    compare(
        "gossip.sharded",
        __doc__,
        rows,
        partial(find_link_runs, STEPS),
        perform,
        sharded,
        [0],
        **choices,
    )
