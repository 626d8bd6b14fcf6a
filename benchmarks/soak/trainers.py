"""Every trainer with a small model, as an object that takes steps: what they hold."""

import hashlib
import resource
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.harness.options import shorten
from benchmarks.soak.watch import Sample, watch
from pyparallel import GossipDataParallel, PipelineTrainer, compression, gossip, optim, pipeline
from pyparallel.gossip.topology import Complete, Ring
from pyparallel.subnets import Partition, SubnetTrainer
from pyparallel.training.trainer import Trainer

WIDTH, BATCH, MICROBATCHES = 32, 8, 4
SMALL_BUCKETS = 0.005  # MiB: two or three buckets

Step = Callable[[], object]


class Running(NamedTuple):
    """A trainer that has been constructed."""

    step: Step
    finish: Step
    trainer: Any
    state: Any = None  # has ``state_dict()`` and ``load_state_dict()``; None: torch's own


Start = Callable[[], Running]


def build_layers() -> nn.Sequential:
    """Return four layers, which a pipeline cuts in the middle."""
    torch.manual_seed(0)
    hidden = [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), *hidden, nn.Linear(WIDTH, 4))


def batches(seed: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of a seed again and again; None: those of this rank."""
    generator = torch.Generator().manual_seed(dist.get_rank() if seed is None else seed)
    inputs = [torch.randn(BATCH, 8, generator=generator) for _ in range(16)]
    return cycle([(each, each[:, :4].sin()) for each in inputs])


def loop(
    model: nn.Module,
    optimizer: Optimizer,
    record: Callable[[Tensor], object] = lambda loss: None,
    *,
    closure: bool = False,
) -> Step:
    """Return a step of a user's training loop, on this rank's batches; every loss is recorded.

    ``closure``: the optimizer is given forward and backward.
    """
    data = batches()

    def evaluate() -> Tensor:
        inputs, targets = next(data)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        record(loss.detach())
        return loss

    def step() -> None:
        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()

    return step


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def averaging(
    algorithm: gossip.Algorithm,
    make_optimizer: Callable[[Any], Optimizer] = sgd,
    *,
    closure: bool = False,
) -> Running:
    layers = build_layers()
    optimizer = make_optimizer(layers.parameters())
    model = GossipDataParallel(layers, optimizer, algorithm, bucket_cap_mb=SMALL_BUCKETS)
    step = loop(model, optimizer, model.record_loss, closure=closure)
    return Running(step, model.flush, model, gossip.GossipState(model, optimizer))


def pipelined(schedule: pipeline.Schedule, stages_per_rank: int = 1) -> Running:
    count = dist.get_world_size() * stages_per_rank
    layers = list(build_layers())
    trainer = PipelineTrainer(
        layers,
        nn.functional.mse_loss,
        sgd,
        schedule,
        num_microbatches=MICROBATCHES,
        split=[len(layers) * stage // count for stage in range(1, count)],
    )
    data = batches(0)  # the target belongs to the inputs of the first stage's rank
    return Running(lambda: trainer.step(*next(data)), trainer.flush, trainer, trainer)


def subnets() -> Running:
    trainer = SubnetTrainer(build_layers(), sgd, Partition(), 5)
    return Running(loop(trainer, trainer.optimizer), trainer.flush, trainer, trainer)


def ddp(compressor: compression.Compressor | None = None) -> Running:
    model = DistributedDataParallel(build_layers(), bucket_cap_mb=SMALL_BUCKETS)
    if compressor is not None:
        compression.compress_ddp(model, compressor)
    return Running(loop(model, sgd(model.parameters())), dist.barrier, model)


def fsdp(compressor: compression.Compressor | None = None) -> Running:
    """Start FSDP2 with compressed gradients and parameters, or as it is."""
    model = build_layers()
    for module in (model[2], model):
        fully_shard(module)
    if compressor is not None:
        compression.compress_fsdp(model, gradients=compressor, parameters=compression.Int8())
    return Running(loop(model, sgd(model.parameters())), dist.barrier, model)


OVERLAPPED = gossip.SGP(overlap=1)

STARTS: dict[str, Start] = {
    "DDP": ddp,
    "FSDP2": fsdp,
    "AllReduce": partial(averaging, gossip.AllReduce()),
    "SGP": partial(averaging, gossip.SGP()),
    "SGP, overlap=1": partial(averaging, OVERLAPPED),
    "SGP, overlap=1, closure": partial(averaging, OVERLAPPED, closure=True),
    "SGP, overlap=1, fused AdamW": partial(averaging, OVERLAPPED, optim.AdamW),
    "SGP, overlap=4": partial(averaging, gossip.SGP(overlap=4)),
    "SGP, Int8": partial(averaging, gossip.SGP(compressor=compression.Int8())),
    "DPSGD": partial(averaging, gossip.DPSGD(Ring)),
    "NoLoCo": partial(averaging, gossip.NoLoCo(interval=5)),
    "ADPSGD": partial(averaging, gossip.ADPSGD(Complete)),
    "LocalSGD": partial(averaging, gossip.LocalSGD(interval=5)),
    "SlowMo": partial(averaging, gossip.SlowMo(OVERLAPPED, interval=5)),
    "DiLoCo": partial(averaging, gossip.DiLoCo(interval=5)),
    "DiLoCo, delay=2, Int8": partial(
        averaging,
        gossip.DiLoCo(5, fragments=2, delay=2, compressor=compression.Int8()),
    ),
    "LeaderSGD": partial(averaging, gossip.LeaderSGD(1, interval=5, global_interval=5)),
    "Hierarchical": partial(averaging, gossip.Hierarchical(OVERLAPPED, 2)),
    **{
        shorten(repr(each)).removesuffix("()"): partial(
            pipelined, each, 2 if isinstance(each, pipeline.Interleaved) else 1
        )
        for each in pipeline.schedules.EVERY_SCHEDULE
    },
    "Interlocking(1)": partial(pipelined, pipeline.Interlocking(1, pipeline.LinearHead(4))),
    "SubnetTrainer": subnets,
    "compress_ddp, TopK": partial(ddp, compression.ErrorFeedback(compression.TopK(0.1))),
    "compress_ddp, Int8": partial(ddp, compression.Int8()),
    "compress_ddp, PowerSGD": partial(ddp, compression.ErrorFeedback(compression.PowerSGD(2))),
    "compress_fsdp, Int8": partial(fsdp, compression.Int8()),
    "compress_fsdp, ErrorFeedback(Int8)": partial(
        fsdp, compression.ErrorFeedback(compression.Int8())
    ),
}


# A trainer of each kind, as they differ in their process groups.
KINDS = [
    "SGP, overlap=1", "ADPSGD", "DiLoCo, delay=2, Int8", "Hierarchical", "PipeOptim",
    "Interlocking(1)", "SubnetTrainer", "compress_ddp, Int8", "compress_fsdp, Int8",
]  # fmt: skip


def run(rank: int, case: str, steps: int) -> tuple[list[Sample], dict[str, float]]:
    running = STARTS[case]()
    samples = watch(lambda index: running.step(), steps)
    running.finish()
    return samples, {}


def make(rank: int, case: str, count: int) -> tuple[list[Sample], dict[str, float]]:
    """Make trainers, one after another, of which every other one is closed, and the rest dropped.

    Descriptors have the usual limit of a process.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))

    def make_one(index: int) -> None:
        running = STARTS[case]()
        running.step()
        running.step()
        closes = index % 2 and isinstance(running.trainer, Trainer)
        if closes or case == "ADPSGD":  # whose ranks wait for answers of those that go on
            running.finish()
        if closes:
            running.trainer.close()

    return watch(make_one, count), {}


def checksum(tensors: list[Any]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def ranks_of(case: str) -> int:
    """Return on how many ranks a case runs: two, or two nodes of two."""
    return 4 if case == "Hierarchical" else 2
