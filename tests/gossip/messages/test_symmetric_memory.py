"""Messages through symmetric memory: the bits of the process group's, and no signal is lost.

Ranks are threads, a rank's other stream is a thread of its own, and a stand-in for torch's handle
has signals that really block. On GPUs: ``tests/gpu/test_symmetric_memory.py``.
"""

import copy
import random
import threading
import time
from collections import Counter, defaultdict
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel import optim
from pyparallel.comm import PeerError
from pyparallel.compression import BufferLayout, Int8, TopK
from pyparallel.gossip import SGP, GossipState
from pyparallel.gossip.messages import SymmetricMemoryExchange
from pyparallel.gossip.messages.symmetric_memory import SharedMemory
from pyparallel.gossip.push_sum.compressed_buffer import CompressedBuffer
from pyparallel.gossip.push_sum.dense_buffer import DenseBuffer
from pyparallel.gossip.push_sum.push_sum import PushSum
from pyparallel.gossip.topology import Complete, DirectedExponential, OnePeerExponential, Ring
from tests.gossip.graphs import StarWithChords
from tests.gossip.loops import batches, flat, start
from tests.gossip.loops import train as train_model
from tests.local_transport import LocalRun, run_threads

TOPOLOGIES = [Ring(4), OnePeerExponential(4), DirectedExponential(5), Complete(3)]
TOPOLOGIES += [StarWithChords(4)]
STEPS = 7
READY, READ = 0, 1


class Node:
    """The memory and the signals of the ranks of one node; ``slow_rank`` pauses at random."""

    def __init__(self, num_ranks, kind=None, slow_rank=None, timeout_ms=20_000):
        self.kind, self.slow_rank, self.timeout_ms = kind or Handle, slow_rank, timeout_ms
        self.everyone = threading.Barrier(num_ranks, timeout=20)
        self.lock = threading.Condition()
        self.memories = defaultdict(dict)  # by window, then by rank
        self.signals = defaultdict(int)  # 0 or 1, by window, receiver, channel and sender
        self.seconds = random.Random(0)

    def pause(self, rank):
        if rank == self.slow_rank and self.seconds.random() < 0.2:
            time.sleep(self.seconds.uniform(0, 0.002))

    def change(self, signal, before, after, timeout_ms):
        """Wait until a signal is what it was, as torch's kernels do for so many ms, and set it."""
        with self.lock:
            in_time = self.lock.wait_for(lambda: self.signals[signal] == before, timeout_ms / 1000)
            if not in_time:
                raise RuntimeError("CUDA error: unspecified launch failure\nmore lines")
            self.signals[signal] = after
            self.lock.notify_all()


class Handle:
    """What torch's rendezvous returns, of a window of bytes."""

    def __init__(self, node, rank, window):
        self.node, self.rank, self.window = node, rank, window

    def get_buffer(self, rank, sizes, dtype, storage_offset=0):
        memory = self.node.memories[self.window][rank]
        assert (*memory.shape, memory.dtype, storage_offset) == (*sizes, dtype, 0)
        return memory

    def put_signal(self, dst_rank, channel, timeout_ms):
        self.node.pause(self.rank)
        self.node.change((self.window, dst_rank, channel, self.rank), 0, 1, timeout_ms)
        self.node.pause(self.rank)

    def wait_signal(self, src_rank, channel, timeout_ms):
        self.node.pause(self.rank)
        self.node.change((self.window, self.rank, channel, src_rank), 1, 0, timeout_ms)
        self.node.pause(self.rank)


class ReadsLate(Handle):
    """Wrong: says that it has read a message before it has; rank 0 then takes its time."""

    def put_signal(self, dst_rank, channel, timeout_ms):
        if channel == READY:
            super().put_signal(dst_rank, channel, timeout_ms)

    def wait_signal(self, src_rank, channel, timeout_ms):
        super().wait_signal(src_rank, channel, timeout_ms)
        if channel == READY:
            super().put_signal(src_rank, READ, timeout_ms)
            time.sleep(0.05 * (self.rank == 0))


class NeverWaits(Handle):
    """Wrong: writes the next message whether this one has been read or not."""

    def wait_signal(self, src_rank, channel, timeout_ms):
        if channel == READY:
            super().wait_signal(src_rank, channel, timeout_ms)


class OnNode(SymmetricMemoryExchange):
    """The exchange of a thread."""

    def __init__(self, exchange, node, window):
        super().__init__(exchange)
        self.node, self.window = node, window

    def share(self, num_bytes, device):
        own = torch.full((num_bytes,), 255, dtype=torch.uint8)
        self.node.memories[self.window][self.rank] = own
        self.node.everyone.wait()
        handle = self.node.kind(self.node, self.rank, self.window)
        return SharedMemory(own, handle, self.node.timeout_ms)


def updates(rank, step, lengths):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [0.1 * torch.randn(length, generator=generator) for length in lengths]


def train(topology, overlap, compressor=None, node=None, ends=(), dtype=torch.float32):
    """Return each rank's buffers, weight and bytes after some steps; one rank may end early."""
    lengths = (37, 5)

    def buffer_of(index, values, exchange):
        if node is not None:
            exchange = OnNode(exchange, node, index)
        if compressor is None:
            return DenseBuffer(values, exchange, snapshot=overlap > 1)
        layout = BufferLayout.flat(values.numel(), "ab"[index])
        return CompressedBuffer(values, exchange, topology, compressor, layout)

    def rank_main(exchange):
        values = [each.to(dtype) for each in updates(exchange.rank, 0, lengths)]
        buffers = [buffer_of(i, each, exchange) for i, each in enumerate(values)]
        averaging = PushSum(buffers, exchange, topology, overlap)
        for step in range(1, 4 if exchange.rank in ends else STEPS):
            averaging.before_step()
            averaging.before_update()
            for each, update in zip(values, updates(exchange.rank, step, lengths), strict=True):
                each.add_(update)
            averaging.after_update()
            averaging.after_step()
        if exchange.rank not in ends:
            averaging.flush()
        return [*values, averaging.status.weight], exchange.run.stats.wire_bytes

    return run_threads(topology.num_ranks, rank_main)


def assert_equal(found, expected):
    for (own, num_bytes), (others, other_bytes) in zip(found, expected, strict=True):
        assert num_bytes == other_bytes
        assert all(map(torch.equal, own, others))


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_bits_are_those_of_the_process_group(topology):
    cases = [(overlap, None) for overlap in (0, 1, 2)]
    cases += [(1, Int8(block_size=32)), (0, TopK(0.3))]
    for slow_rank, (overlap, compressor) in enumerate(cases):
        node = Node(topology.num_ranks, slow_rank=slow_rank % topology.num_ranks)
        found = train(topology, overlap, compressor, node)
        assert_equal(found, train(topology, overlap, compressor))
        assert set(node.signals.values()) == {0}  # every signal was awaited


def test_sixteen_bits():
    expected = train(Ring(3), 1, dtype=torch.bfloat16)
    assert_equal(train(Ring(3), 1, node=Node(3), dtype=torch.bfloat16), expected)


def train_fused(node=None):
    """Return each rank's buffers after steps of a fused optimizer, which writes the messages."""
    topology = OnePeerExponential(4)

    def rank_main(exchange):
        shapes = (37,), (5,)
        parameters = [nn.Parameter(torch.full(each, 1.0 + exchange.rank)) for each in shapes]
        optimizer = optim.SGD([{"params": [each]} for each in parameters], lr=0.1, momentum=0.9)
        values = [part.buffers[0] for part in optimizer.lay_out()]
        buffers = []
        for index, each in enumerate(values):
            own = exchange if node is None else OnNode(exchange, node, index)
            buffers.append(DenseBuffer(each, own))
        averaging = PushSum(buffers, exchange, topology, 1)
        optimizer.adopt(lambda it: averaging.step_buckets(it.step_bucket, it.num_buckets))
        for step in range(1, STEPS):
            for each, gradient in zip(
                parameters, updates(exchange.rank, step, (37, 5)), strict=True
            ):
                each.grad = gradient
            optimizer.step()
        averaging.flush()
        return [each.clone() for each in values], exchange.run.stats.wire_bytes

    return run_threads(4, rank_main)


def test_a_fused_optimizer_writes_into_the_memory_that_others_read():
    node = Node(4, slow_rank=2)
    assert_equal(train_fused(node), train_fused())
    assert set(node.signals.values()) == {0}


@pytest.fixture
def without_reports(monkeypatch):
    """Errors are not shared through a store, which threads do not have."""
    monkeypatch.setattr(
        LocalRun, "error", lambda self, what, cause, **_: PeerError(f"{what}: {cause}")
    )


@pytest.mark.parametrize("kind", [ReadsLate, NeverWaits])
def test_a_message_that_is_overwritten_before_it_is_read_is_found(kind, without_reports):
    with pytest.raises((PeerError, AssertionError)):
        assert_equal(train(Ring(3), 1, node=Node(3, kind, timeout_ms=200)), train(Ring(3), 1))


def test_a_lost_rank_is_an_error_after_the_timeout(without_reports):
    sentence = r"edge 1 -> 0, 0 -> 1 was not delivered: a signal has timed out: .*launch failure"
    for overlap in (0, 1):
        with pytest.raises(PeerError, match=sentence):
            train(Ring(2), overlap, node=Node(2, timeout_ms=200), ends=[1])


class ProcessHandle:
    """A handle between processes: memory is in files, and a signal is a count in the store."""

    def __init__(self, folder, window, num_bytes):
        self.place, self.num_bytes, self.rank = f"{folder}/{window}", num_bytes, dist.get_rank()
        self.store, self.awaited = dist.distributed_c10d._get_default_store(), Counter()
        self.own = self.get_buffer(self.rank, (num_bytes,), torch.uint8)

    def get_buffer(self, rank, sizes, dtype):
        return torch.from_file(f"{self.place}-{rank}", True, self.num_bytes, dtype=dtype)

    def put_signal(self, dst_rank, channel, timeout_ms):
        self.store.add(f"{self.place}/{self.rank}/{dst_rank}/{channel}", 1)

    def wait_signal(self, src_rank, channel, timeout_ms):
        key = f"{self.place}/{src_rank}/{self.rank}/{channel}"
        self.awaited[key] += 1
        while self.store.add(key, 0) < self.awaited[key]:
            time.sleep(0.0005)


def resume_with(rank, folder, *transports):
    """Return the parameters of a trainer that is saved and resumed with another transport."""
    windows = iter(range(100))

    def share(self, num_bytes, device):
        handle = ProcessHandle(folder, next(windows), num_bytes)
        dist.barrier()
        return SharedMemory(handle.own, handle, 20_000)

    saved, data = None, list(batches(rank, 6))
    with mock.patch.object(SymmetricMemoryExchange, "share", share):
        for part, transport in enumerate(transports):
            algorithm = SGP(Ring(2), overlap=1, transport=transport)
            _, optimizer, trainer = start(algorithm, optim.AdamW, cap=0.0002)
            state = GossipState(trainer, optimizer)
            if saved is not None:
                state.load_state_dict(saved)
            train_model(trainer, optimizer, data[3 * part :][:3])
            saved = copy.deepcopy(state.state_dict())
        trainer.flush()
        return [flat(trainer)], trainer.bytes_sent


def test_a_trainer_resumes_with_another_transport(ranks, tmp_path):
    shared, group = "symmetric_memory", "process_group"
    expected = ranks.run(2, resume_with, "", group, group)
    for number, transports in enumerate([(shared, group), (group, shared)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert_equal(ranks.run(2, resume_with, str(folder), *transports), expected)
        assert any(folder.iterdir())  # the memory was used
