"""``python -m benchmarks.pipeline.replicas [--links "100 Mbit/s"] [--methods ...] [--seeds 0]``.

Two replicas of a pipeline of two stages: two nodes behind links of a limited rate, a replica on
each, whose two ranks share the node's link. Hugging Face's Llama of 10.8 million parameters, 512
tokens a microbatch, four microbatches a step of a replica. Torch's 1F1B, of stages that are
DistributedDataParallel, beside ours, with AdamW at one rate and the same tokens. Steps after the
first four are timed: too few to say anything of accuracy.
Rows: ``benchmarks/results/replicas.csv``.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gossip.trainers import bf16_unchecked
from benchmarks.harness.link import limited_links, read_sent
from benchmarks.harness.program import LinkRun, compare, find_link_runs, prepare_for_ranks
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.rows import RESULTS, Row, RunRows, as_text, shorten
from benchmarks.language_models.training import build_llama, next_token_loss
from benchmarks.pipeline.table import replicas
from benchmarks.pipeline.tasks import load_text
from examples.data import draw_windows
from pyparallel import PipelineTrainer, pipeline
from pyparallel.compression import Int8
from pyparallel.gossip import SGP, AllReduce, StreamingDiLoCo
from pyparallel.optim import AdamW

FIELDS = [
    "link", "method", "seed", "parameters", "ranks", "steps", "tokens", "rate", "tokens_per_second",
    "bits", "losses", "torch", "commit",
]  # fmt: skip
REPLICAS, STAGES, MICROBATCHES, STEPS, WARM_UP = 2, 2, 4, 20, 4
LENGTH, WINDOWS = 128, 16  # tokens of a window, windows of a replica's step
SPLIT = [4]  # of the embedding, six blocks and the head
RATE = 1e-3
SECONDS = 1800  # a run's limit

LINKS = {"100 Mbit/s": 100, "1 Gbit/s": 1000}
# Attention under AdamW needs synchronous updates at first: those of the warm-up.
TWO_VERSIONS = pipeline.PipeDream2BW(
    prediction=pipeline.Displacement(), synchronous_updates=WARM_UP
)
PIPE_OPTIM = pipeline.PipeOptim(synchronous_updates=WARM_UP * MICROBATCHES)
Step = Callable[[Tensor], float | None]


def start_ours(
    schedule: pipeline.Schedule, algorithm: Any
) -> Callable[[list[nn.Module], DeviceMesh], Step]:
    def start(layers: list[nn.Module], mesh: DeviceMesh) -> Step:
        trainer = PipelineTrainer(
            layers, next_token_loss, lambda parameters: AdamW(parameters, RATE), schedule,
            num_microbatches=MICROBATCHES, split=SPLIT, mesh=mesh, replicas=algorithm,
        )  # fmt: skip
        return lambda ids: trainer.step(ids, target=ids)

    return start


def start_torch(hook: Any = None) -> Callable[[list[nn.Module], DeviceMesh], Step]:
    def start(layers: list[nn.Module], mesh: DeviceMesh) -> Step:
        index = mesh.get_local_rank("stage")
        own = nn.Sequential(*(layers[: SPLIT[0]] if index == 0 else layers[SPLIT[0] :]))
        module = DistributedDataParallel(own, process_group=mesh.get_group("replicate"))
        if hook is not None:
            module.register_comm_hook(mesh.get_group("replicate"), hook)
        cpu, group = torch.device("cpu"), mesh.get_group("stage")
        schedule = Schedule1F1B(
            PipelineStage(module, index, STAGES, cpu, group=group),
            MICROBATCHES,
            loss_fn=next_token_loss,
        )
        optimizer = torch.optim.AdamW(module.parameters(), RATE, fused=True)

        def step(ids: Tensor) -> float | None:
            losses: list[Tensor] = []
            if index == 0:
                schedule.step(ids)
            else:
                schedule.step(target=ids, losses=losses, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
            return float(torch.stack(losses).detach().mean()) if losses else None

        return step

    return start


METHODS = {
    "torch 1F1B, DDP": start_torch(),
    "torch 1F1B, DDP in bfloat16": start_torch(bf16_unchecked),
    "1F1B, AllReduce": start_ours(pipeline.OneForwardOneBackward(), AllReduce()),
    "2BW, SGP": start_ours(TWO_VERSIONS, SGP(overlap=1)),
    "2BW, SGP, Int8": start_ours(
        TWO_VERSIONS,
        SGP(overlap=1, compressor=Int8()),
    ),
    "PipeOptim, SGP, Int8": start_ours(PIPE_OPTIM, SGP(overlap=1, compressor=Int8())),
    "PipeOptim, StreamingDiLoCo": start_ours(PIPE_OPTIM, StreamingDiLoCo(48)),
}


def train(rank: int, run: LinkRun) -> Row:
    torch.manual_seed(run.seed)
    mesh = init_device_mesh("cpu", (REPLICAS, STAGES), mesh_dim_names=("replicate", "stage"))
    layers = list(pipeline.split_model(build_llama(LENGTH)))
    num_parameters = sum(p.numel() for each in layers for p in each.parameters())
    step, text = METHODS[run.method](layers, mesh), load_text()[0]
    draw = torch.Generator().manual_seed(1000 * run.seed + mesh.get_local_rank("replicate"))
    losses, begin, sent = [], 0.0, 0
    for index in range(run.steps):
        if index == WARM_UP:
            dist.barrier()
            begin, sent = time.perf_counter(), read_sent()
        losses.append(step(draw_windows(text, WINDOWS, LENGTH, draw)))
    dist.barrier()
    seconds, sent = time.perf_counter() - begin, read_sent() - sent
    return {
        "parameters": num_parameters,
        "seconds": seconds / (run.steps - WARM_UP),
        "bits": 8 * sent / num_parameters / (run.steps - WARM_UP),
        "losses": losses if mesh.get_local_rank("stage") == STAGES - 1 else None,
    }


def perform(run: LinkRun) -> Row:
    ranks, tokens = REPLICAS * STAGES, REPLICAS * WINDOWS * LENGTH
    with limited_links(ranks, LINKS[run.link], STAGES) as place:
        found = run_ranks(ranks, place, SECONDS, train, run)
    of_last: Sequence[list[float]] = [each["losses"] for each in found if each["losses"]]
    return {
        "parameters": found[0]["parameters"],
        "ranks": ranks,
        "steps": run.steps,
        "tokens": tokens,
        "rate": RATE,
        "tokens_per_second": f"{tokens / statistics.median(e['seconds'] for e in found):.1f}",
        "bits": f"{statistics.fmean(each['bits'] for each in found):.4f}",
        "losses": as_text(shorten(list(of_last))),
    }


if __name__ == "__main__":
    prepare_for_ranks()
    rows = RunRows(RESULTS / "replicas.csv", FIELDS, num_keys=3)
    choices = {"links": list(LINKS), "methods": list(METHODS)}
    compare(
        "pipeline.replicas",
        __doc__,
        rows,
        partial(find_link_runs, STEPS),
        perform,
        replicas,
        [0],
        **choices,
    )
