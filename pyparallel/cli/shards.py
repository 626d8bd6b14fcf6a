"""``python -m pyparallel shards``: what a rank holds and sends of a model that is sharded."""

import argparse
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ..gossip.topology import OnePeerExponential
from ..training import assign_buckets
from ..training.arguments import require
from ..training.shards import local_of, padded_numel

EXAMPLE = "python -m pyparallel shards --shards 8 --replicas 16"

_SHAPE = (  # Llama 7B
    ("layers", 32, "of the decoder"),
    ("hidden", 4096, "size"),
    ("intermediate", 11008, "size of the gated MLP"),
    ("vocabulary", 32000, "size; embedding and head are not tied"),
)
_OTHERS = (
    ("shards", 8, "ranks that hold a replica"),
    ("replicas", 4, "of the model, in OnePeerExponential"),
    ("bucket-cap-mb", 256, "as of GossipDataParallel, in MiB"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    for name, default, meaning in (*_SHAPE, *_OTHERS):
        text = f"{meaning} (default: {default})"
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--bfloat16", action="store_true", help="parameters (default: float32)")


def report(arguments: argparse.Namespace) -> str:
    """Shard a Llama on meta tensors, of no memory, as rank 0; return bytes, buffers and rounds."""
    try:
        for name, *_ in (*_SHAPE, *_OTHERS):
            value = getattr(arguments, name.replace("-", "_"))
            require(value > 0, f"--{name} must be positive", value)
    except ValueError as error:
        raise SystemExit(f"shards: {error}") from error
    dtype = torch.bfloat16 if arguments.bfloat16 else torch.float32
    with torch.device("meta"):
        model = _build(arguments).to(dtype)
    sizes = [(p.numel(), dtype) for p in model.parameters()]
    cap_bytes = arguments.bucket_cap_mb * 2**20
    whole = assign_buckets(sizes, cap_bytes)
    with _ranks(arguments.replicas * arguments.shards):
        _shard(model, arguments.replicas, arguments.shards)
        held = sum(local_of(p).numel() for p in model.parameters())
        plan = assign_buckets([(padded_numel(p), dtype) for p in model.parameters()], cap_bytes)
    topology = OnePeerExponential(arguments.replicas)
    count, unsharded = sum(plan.lengths), sum(whole.lengths)
    sent = topology.degree * count * dtype.itemsize
    lines = [
        ("parameters of the model", f"{sum(numel for numel, _ in sizes):,}"),
        ("of these on a rank", f"{held:,} in {str(dtype).removeprefix('torch.')}"),
        ("buffers, of a message each", f"{len(plan.lengths):,}"),
        ("bytes of the buffers", f"{count * dtype.itemsize:,}"),
        ("bytes sent per step, and received beside them", f"{sent:,}"),
        ("of an unsharded replica's", f"{count / unsharded:.4f}, with {arguments.shards} shards"),
        ("rounds until the graphs repeat", f"{topology.period:,}"),
    ]
    return "\n".join(f"{label:<46} {value}" for label, value in lines)


def _build(arguments: argparse.Namespace) -> nn.Module:
    size, inner = arguments.hidden, arguments.intermediate
    shapes = [(size, size)] * 4 + [(size, inner)] * 2 + [(inner, size)]
    layers = [
        nn.ModuleList([*(nn.Linear(*shape, bias=False) for shape in shapes), nn.RMSNorm(size),
                       nn.RMSNorm(size)])
        for _ in range(arguments.layers)
    ]  # fmt: skip
    ends = [nn.RMSNorm(size), nn.Linear(size, arguments.vocabulary, bias=False)]
    return nn.ModuleList([nn.Embedding(arguments.vocabulary, size), *layers, *ends])


def _shard(model: nn.Module, num_replicas: int, num_shards: int) -> None:
    from torch.distributed.fsdp import fully_shard  # takes long to import

    sizes, names = (num_replicas, num_shards), ("replicate", "shard")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)["shard"]
    for layer in model.children():
        # A list has no forward, and is sharded by what it holds.
        for each in layer if isinstance(layer, nn.ModuleList) else [layer]:
            fully_shard(each, mesh=mesh)


@contextmanager
def _ranks(num_ranks: int) -> Iterator[None]:
    """Be rank 0 of so many, of which no other exists."""
    fake: Any = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
