"""Flat buckets: the assignment alone, then real parameters."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pyparallel.training.buckets import ALIGNMENT_BYTES, FlatBuckets, assign_buckets

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(DTYPES)), min_size=1, max_size=30),
    st.integers(1, 20_000),
)
def test_segments_do_not_overlap(parameters, cap_bytes):
    plan = assign_buckets(parameters, cap_bytes)
    ends: dict[int, int] = {}
    for (numel, dtype), segment in zip(parameters, plan.segments, strict=True):
        assert segment.numel == numel
        assert plan.dtypes[segment.bucket] == dtype
        assert segment.offset * dtype.itemsize % ALIGNMENT_BYTES == 0
        assert segment.offset >= ends.get(segment.bucket, 0)
        ends[segment.bucket] = segment.offset + numel
    for bucket, length in enumerate(plan.lengths):
        inside = [segment for segment in plan.segments if segment.bucket == bucket]
        assert ends[bucket] <= length
        assert (
            length * plan.dtypes[bucket].itemsize <= cap_bytes
            or len([segment for segment in inside if segment.numel]) <= 1
        )


def test_the_cap_splits_a_model_into_several_buffers():
    plan = assign_buckets([(1024, torch.float32)] * 5, cap_bytes=2 * 4096)
    assert plan.lengths == (2048, 2048, 1024)


def test_other_buffers_laid_out_alike_have_the_same_views():
    model = nn.Sequential(nn.Linear(3, 5), nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last))
    model.append(nn.Linear(5, 2).bfloat16())
    buckets = FlatBuckets(model.parameters(), cap_bytes=10**6)
    others = [buffer.clone() for buffer in buckets.buffers]
    slices = [torch.stack([other + 1, other])[1] for other in others]
    for views in (buckets.views(buckets.buffers), buckets.views(others), buckets.views(slices)):
        for view, parameter in zip(views, model.parameters(), strict=True):
            assert torch.equal(view, parameter)
            assert view.stride() == parameter.stride()
    for view, parameter in zip(buckets.views(buckets.buffers), model.parameters(), strict=True):
        assert view.data_ptr() == parameter.data_ptr()


def test_parameters_become_views_and_stay_themselves():
    model = nn.Sequential(nn.Linear(3, 5), nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last))
    model.append(nn.Linear(5, 2).bfloat16())
    model[0].weight.data = torch.randn(3, 5).t()  # dense, but not contiguous
    values = [p.detach().clone() for p in model.parameters()]
    strides = [p.stride() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buckets = FlatBuckets(model.parameters(), cap_bytes=10**6)
    assert [buffer.dtype for buffer in buckets.buffers] == [torch.float32, torch.bfloat16]
    for parameter, value, stride in zip(model.parameters(), values, strides, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.stride() == stride
    for buffer in buckets.buffers:
        buffer.mul_(2)
    for parameter, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(parameter, 2 * value)
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    total = sum(float(buffer.double().sum()) for buffer in buckets.buffers)
    expected = sum(float(p.detach().double().sum()) for p in model.parameters())
    assert total == pytest.approx(expected, rel=1e-12)
    assert buckets.num_bytes == sum(b.numel() * b.element_size() for b in buckets.buffers)


def test_no_parameters_need_no_buffers():
    assert FlatBuckets([], 100).buffers == []


def test_an_expanded_parameter_gets_memory_of_its_own():
    parameter = nn.Parameter(torch.zeros(1).expand(4))
    FlatBuckets([parameter], cap_bytes=10**6)
    with torch.no_grad():
        parameter[0] = 1
    assert parameter.tolist() == [1, 0, 0, 0]


@given(
    st.lists(st.tuples(st.integers(0, 500), st.sampled_from(DTYPES)), min_size=1, max_size=5),
    st.integers(1, 40),
)
def test_shards_are_all_of_the_buffers_in_order(parameters, num_shards):
    tensors = [nn.Parameter(torch.ones(numel, dtype=dtype)) for numel, dtype in parameters]
    buckets = FlatBuckets(tensors, 1024)
    shards = [buckets.shard(index, num_shards) for index in range(num_shards)]
    assert sum(shard.num_bytes for shard in shards) == buckets.num_bytes
    for number, shard in enumerate(shards, 1):
        for piece in shard.buffers:
            assert piece.data_ptr() % 16 == 0
            piece.fill_(number)
    for buffer in buckets.buffers:  # disjoint views, ascending, none longer than necessary
        numbers = buffer.float()
        assert numbers.numel() == 0 or bool((numbers.diff() >= 0).all())
        counts = numbers.unique(return_counts=True)[1]
        assert all(int(c) <= -(-buffer.numel() // num_shards) + 8 for c in counts)


def test_shards_of_a_small_buffer_may_be_empty():
    buckets = FlatBuckets([nn.Parameter(torch.zeros(3))], 2**20)  # 64 elements with the padding
    assert [len(buckets.shard(index, 17).buffers) for index in range(17)].count(0) == 1
