"""Common properties of all permutation sketches: disjoint shares and decoding."""

import pytest
import torch

from pyparallel.compression import (
    BufferLayout,
    CorruptMessageError,
    Diagonal,
    HeterogeneousPermK,
    PermK,
    ScaledPermK,
)
from pyparallel.compression.sparsifiers.permutation_sketch import PermutationSketch

CPU = torch.device("cpu")
HALF = Diagonal({"*": 4.0})
SKETCHES = [PermK(num_ranks=4), ScaledPermK(HALF, num_ranks=4), HeterogeneousPermK((HALF,) * 4)]
every_sketch = pytest.mark.parametrize("sketch", SKETCHES, ids=lambda s: type(s).__name__)


def send(sketch, x, rank=0):
    layout = BufferLayout.flat(len(x))
    message = sketch.compress(x, sketch.init(layout, CPU, rank))
    return sketch.decompress(message, layout, torch.empty_like(x))


@every_sketch
@pytest.mark.parametrize("numel", [1, 3, 50, 1037])
def test_every_entry_comes_from_one_rank_with_any_preconditioner(sketch, numel):
    assert isinstance(sketch, PermutationSketch)
    sent = torch.stack([send(sketch, torch.ones(numel), rank) for rank in range(4)])
    assert (sent != 0).sum(0).eq(1).all()
    plain = torch.stack([send(SKETCHES[0], torch.ones(numel), rank) for rank in range(4)])
    assert torch.equal(sent != 0, plain != 0), "all sketches of a seed draw the same shares"


@every_sketch
def test_invalid_shares_are_rejected_before_anything_is_written(sketch):
    layout = BufferLayout.flat(1000)
    values, numbers = sketch.compress(torch.ones(1000), sketch.init(layout, CPU))
    out = torch.ones(1000)
    for message in [
        (values[1:], numbers),
        (values.int(), numbers),
        (values, numbers[:1]),
        (values, numbers + 4),
        (values, -numbers - 1),
        (values,),
    ]:
        with pytest.raises(CorruptMessageError):
            sketch.decompress(message, layout, out)
        assert out.eq(1).all()


@every_sketch
def test_a_sketch_for_fewer_ranks_has_fewer_shares(sketch):
    assert sketch.for_num_ranks(2).num_shares() == 2
    assert sketch.for_num_ranks(4) == sketch
