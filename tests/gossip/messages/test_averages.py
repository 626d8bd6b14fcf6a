"""Averages that travel beside the training."""

import gc
from unittest import mock

import torch
from torch.futures import Future
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pyparallel.comm import Run
from pyparallel.compression import BufferLayout, ErrorFeedback, Int8, TopK
from pyparallel.compression.hooks import bucket_reducer
from pyparallel.compression.hooks.bucket_reducer import BucketReducer
from pyparallel.compression.state_store import StateStore
from pyparallel.gossip.messages import averages
from tests.workers import on_ranks


class Reads(TorchDispatchMode):
    """Keeps weak references to the memory that a job reads and has not allocated."""

    def __init__(self):
        super().__init__()
        self.found, self._made = {}, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_new = func is torch.ops.aten.lift_fresh.default  # what torch.tensor has allocated
        for each in _memory_of((args, kwargs)):
            if not is_new and each.cdata not in self._made:
                self.found[each.cdata] = each
        result = func(*args, **(kwargs or {}))
        self._made |= {each.cdata for each in _memory_of(result)} - self.found.keys()
        return result


def _memory_of(value):
    leaves = torch.utils._pytree.tree_leaves(value)
    tensors = [each for each in leaves if torch.is_tensor(each)]
    return [StorageWeakRef(each.untyped_storage()) for each in tensors]


class Stream:
    """Runs a job at once, as a stream's worker enqueues it: its kernels may run much later."""

    def start(self, job, result):
        with Reads() as reads:
            job()
        self.reads = list(reads.found.values())
        future = Future()
        future.set_result(result)  # kept: the worker has recorded it for its stream
        return future


def start_average(compressor):
    average = averages.AllRanks(Run(), torch.device("cpu"), compressor, in_background=True)
    layouts = [BufferLayout.flat(70, "a"), BufferLayout.flat(8, "b")]
    tensors, before = ([torch.randn(each.numel) for each in layouts] for _ in range(2))
    one = torch.ones((), dtype=torch.float64)
    return average.start(layouts, tensors, before, index=0, weight=one)


def start_bucket(compressor):
    store = StateStore(compressor, Run().group_rank, 2)
    reducer = BucketReducer(Run(), store, "raise")
    return reducer, reducer.start(torch.randn(70), BufferLayout.flat(70, "a"), None)


@on_ranks(2)
def test_what_a_job_on_another_stream_reads_lives_until_it_is_waited_for(rank):
    """Else the memory is given to others, which the stream then reads."""
    sparse = ErrorFeedback(TopK(0.2))
    rows = [(start_average, each) for each in (None, Int8(), sparse)]
    rows += [(start_bucket, each) for each in (Int8(), sparse)]
    for start, compressor in rows:
        stream = Stream()
        with (
            mock.patch.object(averages, "comm_worker_for", return_value=stream),
            mock.patch.object(bucket_reducer, "comm_worker_for", return_value=stream),
        ):
            waits = start(compressor)
        gc.collect()
        assert stream.reads
        assert not any(each.expired() for each in stream.reads), (start, compressor)
        del waits
