"""Layouts of the flat buffers that gossip sends."""

from torch import nn

from pyparallel.gossip.push_sum.layout import layouts_of
from pyparallel.training import FlatBuckets


def buckets_of(module, cap_bytes):
    return FlatBuckets([p for p in module.parameters() if p.requires_grad], cap_bytes)


def test_parameters_have_their_names_places_and_shapes():
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 64, bias=False), nn.Linear(64, 1))
    module[2].weight.requires_grad_(False)
    buckets = buckets_of(module, cap_bytes=512)
    layouts = layouts_of(buckets, module)
    assert [layout.numel for layout in layouts] == [b.numel() for b in buckets.buffers]
    assert len(layouts) == 3
    found = {}
    for layout, buffer in zip(layouts, buckets.buffers, strict=True):
        found.update(zip(layout.names, layout.split(buffer), strict=True))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert found.pop(name).equal(parameter)
        else:
            assert name not in found
    assert len(found) == 3  # each gap has its own name
    assert not any(gap.any() for gap in found.values())


def test_shards_are_one_piece_each():
    module = nn.Linear(40, 40)
    shard = buckets_of(module, cap_bytes=2**20).shard(1, 2)
    (layout,) = layouts_of(shard, module)
    assert layout.names == ("buffer 0",)
    assert layout.numel == shard.buffers[0].numel()
