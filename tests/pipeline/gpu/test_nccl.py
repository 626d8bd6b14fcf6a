"""Pipelines on a model of NCCL's streams: what ranks enqueue always completes."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pyparallel.pipeline import (
    Interleaved,
    Interlocking,
    OneForwardOneBackward,
    PipelineShape,
    PipeOptim,
    ZeroBubble,
)
from pyparallel.pipeline.interlocking.runtime import InterlockingExecutor
from pyparallel.pipeline.messages import P2PGroups, stage_p2p
from pyparallel.pipeline.messages import channel as p2p_channel
from pyparallel.pipeline.messages.endpoints import Endpoint, StreamKind
from pyparallel.pipeline.messages.format import NO_BATCH
from pyparallel.pipeline.messages.payloads import NcclPayloads
from pyparallel.pipeline.messages.stage_p2p import StageP2P
from pyparallel.pipeline.runtime.executor import Executor
from pyparallel.pipeline.runtime.options import StageOptions
from pyparallel.pipeline.schedules.schedule import Flushing
from tests.pipeline.every_schedule import EVERY_SCHEDULE
from tests.pipeline.gpu.nccl_model import META, Group, World, run_streams

STEPS = 2


class FakeStage:
    """A stage whose actions are computations of the model, with values of changing length."""

    def __init__(self, index, world, lengths, has_head):
        self.criteria, self.head, self.options = {}, has_head or None, StageOptions()
        self.weights = self
        self.index, self._world, self._lengths = index, world, lengths

    def forward(self, microbatch, *_):
        self._world.compute()
        return torch.empty(self._lengths(microbatch), device=META, requires_grad=True)

    backward = backward_input = backward_and_input_vjp = forward

    def input_vjp(self, microbatch, gradients):
        return [(self.forward(microbatch),) for _ in gradients]

    def output_grads(self, microbatch, *_):
        return (self.forward(microbatch),)

    def backward_weight(self, *_):
        self._world.compute()

    head_backward = output_grads
    accumulate_grads = backward_weight

    def update(self):
        self._world.compute()

    def take_last_read(self):
        return None  # nothing is measured

    def restart(self, policy):
        pass


class FakeSplitter:
    def find_input_error(self):
        return None

    def inputs(self, microbatch):
        return torch.empty(1, device=META)

    def batch_meta(self, microbatch):
        return NO_BATCH

    def note_batch_meta(self, microbatch, batch):
        pass


def enqueue(schedule, shape, monkeypatch, *, groups=None, lengths=lambda nr: 1 + nr % 3):
    """Return the world of all ranks after they have run the steps of a schedule."""
    world = World(shape.num_ranks, connects=groups is None)

    def rank_of(group=None):
        return world.thread.rank

    def run(rank):
        is_ring = shape.num_stages > shape.num_ranks
        connected = groups and groups(world)
        p2p = StageP2P(
            shape, connected or P2PGroups.connect(Group(world, None, "nccl"), META, is_ring=is_ring)
        )
        last = shape.num_stages - 1
        stages = {s: FakeStage(s, world, lengths, s < last) for s in shape.stages(rank)}
        if isinstance(schedule, Interlocking):
            executor = InterlockingExecutor(
                stages, shape, p2p, rank, schedule.reach(shape), 2 * shape.num_microbatches, None
            )
        else:
            executor = Executor(stages, shape, p2p, rank)
        flushes = isinstance(schedule, Flushing)
        for step in range(STEPS):
            executor.train(
                lambda rank, step=step: schedule.step(shape, rank, step), FakeSplitter(),
                p2p.barrier if flushes else None, empty=flushes,
            )  # fmt: skip
            if flushes:
                executor.barrier(0)
        executor.train(lambda rank: schedule.drain(shape, rank, STEPS), FakeSplitter())
        executor.barrier(0)
        executor.restart(schedule.versions(shape))

    with monkeypatch.context() as patch:
        patch.setattr(stage_p2p, "_UPDATES_VIA_HOST", 0)
        patch.setattr(dist, "get_rank", rank_of)
        patch.setattr(dist, "get_world_size", lambda group=None: shape.num_ranks)
        patch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
        world.run(run)
    return world


@pytest.mark.parametrize(("loading", "is_new"), [("LAZY", True), ("EAGER", False)])
def test_values_of_new_shapes_travel_through_the_host(loading, is_new, monkeypatch):
    """Until two updates for each stage later, as kernels may be loaded for them."""
    sent = []
    channel = SimpleNamespace(send=lambda *message, via_host, batch: sent.append(via_host))
    monkeypatch.setattr(stage_p2p, "Channel", lambda *_: channel)
    monkeypatch.setenv("CUDA_MODULE_LOADING", loading)
    groups = SimpleNamespace(rank=0, payloads=[None], headers="a group of gloo")
    p2p = StageP2P(PipelineShape(4, 2, 2), groups)  # two stages on this rank

    def sends(length):
        sent.clear()
        for stage in (1, 3):
            p2p.send(Endpoint(stage, StreamKind.ACTIVATIONS), 0, torch.ones(length))
        return sent[:]

    with torch.no_grad():  # an evaluation, without the kernels of a backward
        assert sends(5) == [True, True]
    for _ in range(8):
        assert sends(5) == [True, True]
        p2p.count_update()
    assert sends(5) == [False, False]
    p2p.send(Endpoint(1, StreamKind.ACTIVATIONS), 0, torch.ones(3))
    for _ in range(8):
        assert sent.pop() is is_new
        p2p.count_update()
        p2p.send(Endpoint(1, StreamKind.ACTIVATIONS), 0, torch.ones(3))
    assert [sent.pop(), *sends(3)] == [False, False, is_new]


def check(schedule, shape, monkeypatch):
    world = enqueue(schedule, shape, monkeypatch)
    assert world.num_early == 0
    assert [run_streams(world, eager) for eager in (False, True)] == [0, 0]
    for operations in world.streams.values():  # one stream never holds two edges
        assert len({(each.rank, each.peer) for each in operations}) == 1


def test_pipelines_complete(monkeypatch, subtests):
    for schedule, shape in [
        (OneForwardOneBackward(), PipelineShape(4, 5, 4)),
        (Interleaved(), PipelineShape(6, 6, 3)),
        (ZeroBubble(), PipelineShape(3, 4, 3)),
        (PipeOptim(), PipelineShape(4, 3, 4)),
        (PipeOptim(), PipelineShape(4, 2, 2)),
        (Interlocking(window=3), PipelineShape(4, 3, 4)),
    ]:
        with subtests.test(schedule=schedule, shape=shape):
            check(schedule, shape, monkeypatch)


@pytest.mark.slow
def test_every_schedule_of_up_to_8_stages_completes(monkeypatch, subtests):
    interlocking = [Interlocking(window=window, max_ahead=2) for window in (1, 2, 3, 8)]
    for schedule in [*EVERY_SCHEDULE, *interlocking]:
        for num_stages in range(2, 9):
            for num_ranks in range(2, num_stages + 1):
                for num_microbatches in (num_ranks, 11):
                    if num_stages % num_ranks:
                        continue
                    shape = PipelineShape(num_stages, num_microbatches, num_ranks)
                    if schedule.validation_error(shape) is None:
                        with subtests.test(schedule=schedule, shape=shape):
                            check(schedule, shape, monkeypatch)


class PostedAhead(NcclPayloads):
    """Receives that are posted once the length of their stream's payloads is known."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._lengths, self._posted = {}, deque()

    def prefetch(self, streams):
        for stream in streams[len(self._posted) :]:
            if stream not in self._lengths:
                return
            self._posted.append(super().recv(stream, self._lengths[stream]))

    def recv(self, stream, length):
        self._lengths[stream] = length
        return self._posted.popleft() if self._posted else super().recv(stream, length)


def two_groups(world):
    """Return a group for each direction, which all neighbors share."""
    return P2PGroups(Group(world, 0, "gloo"), [Group(world, n, "nccl") for n in (1, 2)], META)


def test_the_model_finds_the_deadlock_of_receives_posted_ahead(monkeypatch):
    monkeypatch.setattr(p2p_channel, "NcclPayloads", PostedAhead)
    for num_posted, num_stages, is_stuck in (
        (2, 3, False),
        (2, 4, True),
        (3, 2, False),
        (3, 3, True),
    ):
        monkeypatch.setattr(p2p_channel, "PREFETCH_DEPTH", num_posted)
        world = enqueue(
            OneForwardOneBackward(), PipelineShape(num_stages, 12, num_stages), monkeypatch,
            groups=two_groups, lengths=lambda _: 1,
        )  # fmt: skip
        assert world.num_early > 0
        assert run_streams(world, eager=False) == 0
        assert (run_streams(world, eager=True) > 0) is is_stuck, (num_posted, num_stages)
