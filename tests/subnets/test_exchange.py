"""Scatter and merge of cut tensors, between threads."""

from itertools import product

import torch

from pyparallel.subnets import Central, Partition, Sharded
from pyparallel.subnets.exchange import assign, merge, scatter
from pyparallel.subnets.partition.tensor_cut import find_cuts
from pyparallel.subnets.shards import ModelShards
from pyparallel.subnets.subnet import build_subnet, tensors_of
from tests.subnets.helpers.local_collectives import run_local_ranks
from tests.subnets.helpers.models import TRANSFORMER_RULES, convolutions, mlp, transformer

CASES = [
    (mlp, Partition()),
    (convolutions, Partition()),
    (transformer, Partition(TRANSFORMER_RULES)),
]


def test_scatter_selects_each_parts_indices_and_merge_overwrites_them(subtests):
    for case, num, placement in product(CASES, (1, 2, 3, 4), (Sharded(), Central(0))):
        with subtests.test(f"{case[0].__name__} {num} {placement}"):
            check_scatter_and_merge(*case, num, placement)


def check_scatter_and_merge(make, partition, num, placement):
    model = make().to(torch.float64)
    tensors = {name: tensor.detach() for name, tensor in tensors_of(model).items()}
    cut_dims = partition.cut_dims(model)
    cuts = find_cuts(cut_dims, tensors)
    draw = partition.draw(cut_dims, 3, num)

    def run(collectives):
        subnet = build_subnet(model, cut_dims, cuts, collectives.rank, num)
        parts = tensors_of(subnet)
        shards = ModelShards(cuts, tensors, placement, collectives)
        assignments = assign(cuts, draw, placement, collectives)
        scatter(shards.cut_tensors(parts), assignments, collectives)
        for name, cut in cuts.items():
            assert torch.equal(
                parts[name], pick(tensors[name], cut.indices(draw, collectives.rank))
            )
        with torch.no_grad():
            for name in cuts:
                parts[name].add_(collectives.rank + 1)
        merge(shards.cut_tensors(parts), assignments, collectives)
        out = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        shards.gather_into(out)
        return out

    for out in run_local_ranks(num, run):
        for name, cut in cuts.items():
            expected = tensors[name].clone()
            for subnet in range(num):
                add_at(expected, cut.indices(draw, subnet), subnet + 1)
            assert torch.equal(out[name], expected), name


def pick(tensor, indices):
    for dim, entries in indices.items():
        tensor = tensor.index_select(dim, entries)
    return tensor


def add_at(tensor, indices, value):
    chosen = torch.zeros_like(tensor)
    mask = torch.ones(1, dtype=torch.bool)
    for dim in range(tensor.dim()):
        line = torch.zeros(tensor.shape[dim], dtype=torch.bool)
        line[indices.get(dim, slice(None))] = True
        mask = mask & line.view(-1, *[1] * (tensor.dim() - dim - 1))
    chosen[mask] = value
    tensor.add_(chosen)
