"""Memory that another stream reads: nobody may reuse it before, wherever the package has a stream.

The GPU's path runs without one: tensors are on the meta device, streams are stand-ins, and
collectives move nothing.
"""

from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyparallel.comm import Collectives, Run
from pyparallel.compression import (
    BufferLayout,
    Cast,
    ErrorFeedback,
    Int8,
    Piece,
    PowerSGD,
    TopK,
    nonfinite,
)
from pyparallel.compression.hooks import bucket_reducer, comm_worker
from pyparallel.compression.hooks.bucket_reducer import BucketReducer
from pyparallel.compression.hooks.comm_worker import CudaStreamWorker
from pyparallel.compression.state_store import StateStore
from pyparallel.gossip.messages import (
    NeighborExchange,
    SymmetricMemoryExchange,
    averages,
    symmetric_memory,
)
from pyparallel.gossip.messages.averages import AllRanks
from pyparallel.gossip.messages.symmetric_memory import SharedMemory
from pyparallel.ops import _corrupt
from pyparallel.pipeline.messages.payloads import NcclPayloads
from pyparallel.training.host_copy import HostCopy
from tests.local_transport import LocalRun

GPU = torch.device("meta")


@dataclass(eq=False)
class Memory:
    """A storage: which stream has allocated it, which others use it, and what it is."""

    weak: StorageWeakRef
    stream: "Stream"
    what: str
    used: dict["Stream", int] = field(default_factory=dict)  # when last
    recorded: set["Stream"] = field(default_factory=set)


class Stream:
    """A stream, or an event on one: how many kernels it has, and which of others are over first."""

    current = None
    device = GPU

    def __init__(self, *_, **options):
        self.time, self.waited_for = 0, Counter()

    def wait_stream(self, other):
        self.waited_for |= other.waited_for
        self.waited_for[other] = max(self.waited_for[other], other.time)

    wait_event = wait_stream

    def record_event(self):
        event = Stream()
        event.wait_stream(self)
        return event


class Future:
    """A future whose wait has the current stream wait for the one that completes it."""

    def __init__(self, devices):
        self.devices = devices

    def set_result(self, result):
        self.event, self.result = Stream.current.record_event(), result

    def wait(self):
        Stream.current.wait_event(self.event)
        return self.result


class Allocator(TorchDispatchMode):
    """Finds memory that is freed while a stream that its own has not waited for may read it."""

    running = None

    def __init__(self):
        super().__init__()
        self.memory, self.found = {}, []
        self.num_shared = 0  # uses by a stream that has not allocated what it uses

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.find_reused()
        result = func(*args, **(kwargs or {}))
        self.use((args, kwargs, result), str(func))
        return result

    def use(self, tensors, what=""):
        stream = Stream.current
        stream.time += 1
        for each in tree_leaves(tensors):
            if torch.is_tensor(each) and each.is_meta:
                memory = self.of(each, what)
                if memory.stream is not stream:
                    memory.used[stream] = stream.time
                    self.num_shared += 1

    def of(self, tensor, what=""):
        weak = StorageWeakRef(tensor.untyped_storage())
        return self.memory.setdefault(weak.cdata, Memory(weak, Stream.current, what))

    def find_reused(self):
        """Find what the current stream may allocate again while others still use it."""
        stream = Stream.current
        for key, memory in list(self.memory.items()):
            if memory.stream is stream and memory.weak.expired():
                del self.memory[key]
                ordered = {stream, *memory.recorded}  # what these have waited for is over
                if any(
                    all(each is not user and each.waited_for[user] < time for each in ordered)
                    for user, time in memory.used.items()
                ):
                    self.found.append(memory.what)


@contextmanager
def on(stream):
    before, Stream.current = Stream.current, stream or Stream.current
    yield
    Stream.current = before


@pytest.fixture
def allocator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream.current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(comm_worker, "Future", Future)
    for module in (averages, bucket_reducer, symmetric_memory):
        monkeypatch.setattr(module, "comm_worker_for", CudaStreamWorker)
    monkeypatch.setattr(
        nonfinite, "HostCopy", lambda tensor: HostCopy(tensor.new_zeros(1, device="cpu"))
    )
    monkeypatch.setattr(Run, "within", lambda self, members: self)
    monkeypatch.setattr(Collectives, "_run", lambda *given, **_: Allocator.running.use(given))
    monkeypatch.setattr(Run, "waiting", lambda *_: nullcontext())
    zeros = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64, device=GPU)
    monkeypatch.setattr(_corrupt, "_host_visible_zero", lambda device: zeros)
    monkeypatch.setattr(_corrupt, "_counters", {})
    monkeypatch.setattr(
        torch.Tensor, "is_cuda", property(lambda tensor: tensor.is_meta), raising=False
    )

    new_tensor = torch.tensor

    def tensor(*given, **options):  # which a dispatch mode does not see
        result = new_tensor(*given, **options)
        Allocator.running.use(result, "torch.tensor")
        return result

    monkeypatch.setattr(torch, "tensor", tensor)

    def record_stream(tensor, stream):
        Allocator.running.of(tensor).recorded.add(stream)

    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    monkeypatch.setattr(Stream, "current", Stream())
    monkeypatch.setattr(Allocator, "running", Allocator())
    with Allocator.running:
        yield Allocator.running


def compute():
    torch.ones(4, device=GPU) + 1


def add_what_nobody_keeps():
    kept = torch.ones(4, device=GPU)
    future = CudaStreamWorker(GPU).start(partial(kept.add_, kept + 1), kept)
    compute()
    future.wait()


def average_in_background(compressor):
    average = AllRanks(LocalRun(0, 2), GPU, compressor, in_background=True)
    layouts = [BufferLayout.flat(70, "a"), BufferLayout.flat(8, "b")]
    in_flight = []
    for index in range(4):  # two at a time
        tensors, before = ([torch.randn(each.numel, device=GPU) for each in layouts] for _ in "ab")
        one = torch.ones((), dtype=torch.float64, device=GPU)
        in_flight.append(average.start(layouts, tensors, before, index=index, weight=one))
        del tensors, before, one
        compute()
        if index:
            in_flight.pop(0)()
    in_flight.pop()()
    compute()


def average_buckets(compressor, policy="raise"):
    run = LocalRun(0, 2)
    reducer = BucketReducer(run, StateStore(compressor, 0, 2), policy)
    for step, lengths in enumerate([(70, 8, 9), (9, 70, 8), (78, 9)]):  # DDP builds new buckets
        futures = []
        for length in lengths:
            layout = BufferLayout(tuple(PIECES[each] for each in PARTS[length]))
            futures.append(reducer.start(torch.randn(length, device=GPU), layout, None))
            compute()
        for each in futures:
            each.wait()
        del futures
        reducer.end_step()
        if reducer.failure:
            raise reducer.failure
        run.counts.steps = step + 1


PIECES = {70: Piece("a", (10, 7)), 8: Piece("b", (8,)), 9: Piece("c", (9,))}
PARTS = {70: (70,), 8: (8,), 9: (9,), 78: (70, 8)}


class OnFakeGpu(SymmetricMemoryExchange):
    def share(self, num_bytes, device):
        own, theirs = (torch.zeros(num_bytes, dtype=torch.uint8, device=GPU) for _ in "ab")
        handle = SimpleNamespace(
            get_buffer=lambda *_: theirs,
            put_signal=lambda *_: None,
            wait_signal=lambda *_: None,
        )
        return SharedMemory(own, handle, 1000)


def swap_through_symmetric_memory():
    exchange = OnFakeGpu(NeighborExchange(LocalRun(0, 2)))
    exchange.reserve([(280, 32)], GPU)
    for index in range(3):
        message = [torch.randn(70, device=GPU), torch.randn(8, device=GPU)]
        swapped = exchange.swap(message, [1], [1], round_index=index)
        del message
        compute()
        sum(each.sum() for each in swapped.wait().messages[0])
        del swapped


class Gpu(str):
    """The meta device, as a GPU's where one asks for its type."""

    type = "cuda"


class NcclGroup:
    """Two ends of NCCL's stream; ``is_completed`` tells the host, which then knows all is over."""

    def __init__(self):
        self.stream = Stream()

    def send(self, tensors, peer, tag):
        self.stream.wait_stream(Stream.current)
        with on(self.stream):
            Allocator.running.use(tensors)
        event = self.stream.record_event()
        return SimpleNamespace(
            is_completed=lambda: Stream.current.wait_event(event) is None,
            wait=lambda: Stream.current.wait_event(event),
        )

    recv = send


def send_between_stages():
    payloads = NcclPayloads(1, NcclGroup(), NcclGroup(), Gpu("meta"))
    for _ in range(4):
        payloads.send(0, torch.randn(70, device=GPU) + 1)
        payload, work = payloads.recv(1, 280)
        work.wait()
        del work
        payload.sum()
        del payload
        compute()
    payloads.flush()
    compute()


JOBS = [
    *(partial(average_in_background, each) for each in (None, Int8(), ErrorFeedback(TopK(0.2)))),
    *(
        partial(average_buckets, each)
        for each in (Cast(), Int8(), ErrorFeedback(TopK(0.2)), PowerSGD(2))
    ),
    partial(average_buckets, Int8(), "skip"),
    swap_through_symmetric_memory,
    send_between_stages,
]


def test_what_another_stream_reads_is_recorded_or_kept_until_it_is_waited_for(allocator, subtests):
    add_what_nobody_keeps()
    assert allocator.found == ["aten.add.Tensor"]
    for job in JOBS:
        with subtests.test(job=job):
            allocator.num_shared, allocator.found = 0, []
            job()
            assert allocator.num_shared
            assert not allocator.found
