"""A single rank does the work, and counts the bytes, of a rank in a group."""

import pytest
import torch
from torch import nn

from pyparallel.compression import BufferLayout, Cast, Collectives, Compressor, Int8
from pyparallel.planning.recommend import CANDIDATES, DENSE, Candidate, profile
from pyparallel.planning.recommend.profile import flat_gradients, in_buckets
from pyparallel.planning.simulate import SingleRankCollectives

RANKS = 3
LAYOUT = BufferLayout.of([("weight", torch.empty(64, 40)), ("bias", torch.empty(64))])


def make_gradients():
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(0))


def average(compressor: Compressor, collectives: Collectives):
    x = make_gradients()
    compressor.mean_(x, compressor.init(LAYOUT, x.device, collectives.rank), collectives)
    return x, collectives.stats.payload_bytes, collectives.stats.wire_bytes


def average_all(rank):
    return {each.name: average(each.steady_state, Collectives()) for each in CANDIDATES[1:]}


def test_bytes_are_those_of_rank_0_in_a_group(ranks):
    of_ranks = ranks.run(RANKS, average_all)[0]
    for candidate in CANDIDATES[1:]:
        mean, payload_bytes, wire_bytes = average(
            candidate.steady_state, SingleRankCollectives(RANKS)
        )
        assert mean.isfinite().all(), candidate.name
        assert payload_bytes == of_ranks[candidate.name][1], candidate.name
        assert wire_bytes == pytest.approx(of_ranks[candidate.name][2]), candidate.name


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_the_mean_of_equal_gradients_is_the_gradient(num_ranks):
    mean, _, _ = average(Int8(), SingleRankCollectives(num_ranks))
    part = slice(0, 256)  # a block that rank 0 averages in a group of any size
    torch.testing.assert_close(mean[part], make_gradients()[part], atol=0.05, rtol=0)


def test_a_broadcast_from_another_rank_gives_indices():
    tensor = torch.full((4,), -7, dtype=torch.int32)
    SingleRankCollectives(3).broadcast_(tensor, 0)
    assert tensor.tolist() == [-7] * 4
    SingleRankCollectives(3).broadcast_(tensor, 2)
    assert tensor.tolist() == [0, 1, 2, 3]


def make_parameters(*sizes, dtype=torch.float32):
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return [(f"{dtype} {i}", parameter) for i, parameter in enumerate(parameters)]


def test_a_profile_has_time_and_bytes():
    buckets = list(in_buckets(make_parameters(1000, 3000)))
    dense, half = (profile(each, buckets, 4) for each in (DENSE, Candidate("bf16", Cast())))
    assert (dense.coding, dense.payload_bytes, dense.wire_bytes) == (0, 16_000, 24_000)
    assert dense.collectives == len(buckets) == 1
    assert dense.buckets == half.buckets == (1.0,)
    assert half.coding > 0
    assert (half.payload_bytes, half.wire_bytes) == (10_000, 12_000)
    assert half.collectives > 1


def test_buckets_are_those_of_ddp():
    mega = 2**18  # float32 elements in a MiB
    named = make_parameters(10 * mega, 20 * mega, mega // 2, mega // 2)
    buckets = [[name for name, _ in bucket] for bucket in in_buckets(named)]
    names = [name for name, _ in named]
    assert buckets == [[names[3], names[2]], [names[1], names[0]]]
    mixed = make_parameters(4) + make_parameters(6, dtype=torch.bfloat16)
    sizes = {(flat.dtype, flat.numel()) for flat in map(flat_gradients, in_buckets(mixed))}
    assert sizes == {(torch.float32, 4), (torch.bfloat16, 6)}


def test_an_unused_parameter_has_a_gradient_of_zeros():
    named = make_parameters(2, 3)
    named[0][1].grad = None
    assert flat_gradients(named).tolist() == [0, 0, 1, 1, 1]
