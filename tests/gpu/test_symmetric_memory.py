"""Ranks that share a GPU read each other's memory, without NCCL (symmetric memory)."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from pyparallel.comm import Run
from pyparallel.compression import BufferLayout, Int8, TopK
from pyparallel.gossip.messages import NeighborExchange, SymmetricMemoryExchange
from pyparallel.gossip.push_sum.compressed_buffer import CompressedBuffer
from pyparallel.gossip.push_sum.dense_buffer import DenseBuffer
from pyparallel.gossip.push_sum.push_sum import PushSum
from pyparallel.gossip.topology import Ring
from pyparallel.ops import mix_

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CASES = [(0, None), (1, None), (1, Int8()), (0, TopK(0.3))]
NUM_BYTES = 2**28


def share_the_gpu():
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def average_with_the_neighbor(rank):
    share_the_gpu()
    from torch.distributed import _symmetric_memory as symmetric

    z = symmetric.empty(2**20, dtype=torch.float32, device="cuda").fill_(float(rank))
    handle = symmetric.rendezvous(z, dist.group.WORLD)
    torch.cuda.synchronize()
    dist.barrier()
    neighbor = handle.get_buffer(1 - rank, z.shape, z.dtype)
    own, one = z.clone(), torch.ones((), dtype=torch.float64, device="cuda")
    mix_(own, one, [neighbor], torch.ones(1, dtype=torch.float64, device="cuda"))
    torch.cuda.synchronize()
    dist.barrier()
    return bool((own == 0.5).all())


def test_a_kernel_mixes_what_lies_in_another_processs_memory(ranks):
    assert ranks.run(2, average_with_the_neighbor, time_limit=40) == [True, True]


def gossip(rank, device, overlap, compressor):
    """Return two buffers after some steps: over gloo on the CPU, else through symmetric memory."""
    generator = torch.Generator().manual_seed(rank)
    values = [torch.randn(length, generator=generator).to(device) for length in (100_003, 33)]
    exchange, topology, buffers = NeighborExchange(Run()), Ring(2), []
    for name, each in zip("ab", values, strict=True):
        own = exchange if device.type == "cpu" else SymmetricMemoryExchange(exchange)
        if compressor is None:
            buffers.append(DenseBuffer(each, own))
        else:
            layout = BufferLayout.flat(each.numel(), name)
            buffers.append(CompressedBuffer(each, own, topology, compressor, layout))
    averaging = PushSum(buffers, exchange, topology, overlap)
    for _ in range(20):
        averaging.before_step()
        averaging.before_update()
        for each in values:
            each.add_(torch.randn(each.shape, generator=generator).to(device))
        averaging.after_update()
        averaging.after_step()
    averaging.flush()
    return [each.cpu() for each in values]


def compare_with_gloo(rank):
    device = share_the_gpu()
    wrong = []
    for case in CASES:
        found, wanted = gossip(rank, device, *case), gossip(rank, torch.device("cpu"), *case)
        wrong += [] if all(map(torch.equal, found, wanted)) else [str(case)]
    return wrong


def test_gossip_has_the_bits_of_gloo_on_the_cpu(ranks):
    assert ranks.run(2, compare_with_gloo, time_limit=150) == [[], []]


def kernels_beside_a_message(rank):
    """Return how many copies moved a message, and this process's kernels that ran beside one.

    Not whether the driver copies by an engine or by a kernel of its own, which within one GPU it
    may: that a multiprocessor is free shows only in the time of other work, between two GPUs.
    """
    exchange, device = SymmetricMemoryExchange(NeighborExchange(Run())), share_the_gpu()
    message = exchange.reserve([[NUM_BYTES]], device)[:NUM_BYTES].fill_(rank)
    into = [[torch.empty_like(message)]]
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(3):
            started = exchange.swap([message], [1 - rank], [1 - rank], into=into)
            torch.cuda.synchronize()
            assert bool((started.wait().messages[0][0] == 1 - rank).all())
    events = [each for each in profiled.events() if each.device_type == DeviceType.CUDA]
    copies = [each.time_range for each in events if "Memcpy" in each.name]
    seconds = [span.end - span.start for span in copies]
    large = [span for span, each in zip(copies, seconds, strict=True) if each > max(seconds) / 10]
    beside = [
        each.name
        for each in events
        if "Memcpy" not in each.name
        and any(
            each.time_range.start < span.end and span.start < each.time_range.end for span in large
        )
    ]
    return len(large), beside


def test_no_kernel_runs_while_a_message_moves(ranks):
    assert ranks.run(2, kernels_beside_a_message, time_limit=150) == [(3, []), (3, [])]
