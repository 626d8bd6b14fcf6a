"""Cuts of a tensor: the intersections of owners' rows and subnets' parts."""

from itertools import product

import pytest
import torch

from pyparallel.subnets import Partition, Sharded
from pyparallel.subnets.partition.tensor_cut import block_of, find_cuts
from pyparallel.subnets.subnet import tensors_of
from tests.subnets.helpers.models import TRANSFORMER_RULES, convolutions, transformer

CASES = [(convolutions, Partition()), (transformer, Partition(TRANSFORMER_RULES))]


def test_blocks_make_up_every_part_in_order(subtests):
    for num, (make, partition) in product([1, 2, 3], CASES):
        with subtests.test(f"{make.__name__} {num}"):
            model = make()
            tensors = tensors_of(model)
            cut_dims = partition.cut_dims(model)
            cuts = find_cuts(cut_dims, tensors)
            draw = partition.draw(cut_dims, 1, num)
            for name, cut in cuts.items():
                whole = tensors[name].detach()
                covered = torch.zeros_like(whole)
                for subnet in range(num):
                    indices = cut.indices(draw, subnet)
                    part = whole
                    for dim, entries in indices.items():
                        part = part[(slice(None),) * dim + (entries,)]
                    assert part.shape == cut.part_shape(subnet, num)
                    for owner in range(num):
                        owned = Sharded().rows(whole.shape[0], owner, num)
                        block = block_of(cut, indices, owned)
                        rows = whole[owned.start : owned.stop]
                        assert torch.equal(block.take(rows), part[block.span])
                        assert block.take(rows).shape == block.shape
                        ones = torch.ones(block.shape)
                        target = covered[owned.start : owned.stop]
                        block.put_(target, ones + block.take(target))
                assert covered.max() == 1
                expected = whole.numel() / num ** (len(cut.axes) - 1)
                assert covered.sum() == pytest.approx(expected, rel=0.35 if num == 3 else 0)


def test_uncut_tensors_have_no_cut():
    model = convolutions()
    cuts = find_cuts(Partition().cut_dims(model), tensors_of(model))
    assert "9.bias" not in cuts
    assert set(cuts["4.weight"].axes) == {0, 1}
