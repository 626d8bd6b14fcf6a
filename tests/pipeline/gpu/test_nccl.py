"""Pipelines on a model of NCCL's streams: what ranks enqueue always completes."""

from collections import Counter, deque
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pyparallel.pipeline import (
    Interleaved,
    Interlocking,
    OneForwardOneBackward,
    PipeDream,
    PipeDream2BW,
    PipelineShape,
    PipeOptim,
    XPipe,
    ZeroBubble,
)
from pyparallel.pipeline.interlocking.runtime import InterlockingExecutor
from pyparallel.pipeline.messages import P2PGroups, payloads, stage_p2p
from pyparallel.pipeline.messages import channel as p2p_channel
from pyparallel.pipeline.messages.endpoints import Endpoint, StreamKind
from pyparallel.pipeline.messages.format import NO_BATCH
from pyparallel.pipeline.messages.payloads import NcclPayloads
from pyparallel.pipeline.messages.stage_p2p import StageP2P
from pyparallel.pipeline.runtime.executor import Executor
from pyparallel.pipeline.runtime.generators import StageGenerators
from pyparallel.pipeline.runtime.options import StageOptions
from pyparallel.pipeline.schedules.schedule import Flushing
from tests.pipeline.every_schedule import EVERY_SCHEDULE
from tests.pipeline.gpu.nccl_model import META, Group, World

STEPS = 2


class FakeStage:
    """A stage whose actions are computations of the model, with values of changing length.

    ``lengths`` gives that of a stage's number-th forward, or another action, since the first step;
    each length has kernels of its own. With replicas an update takes a round with another one's,
    which travels until the next update if it overlaps.
    """

    def __init__(self, index, world, lengths, has_head, replicas):
        self.criteria, self.head, self.options = {}, has_head or None, StageOptions()
        self.weights = self
        self.index, self._world, self._lengths = index, world, lengths
        self._replicas, self._in_flight = replicas, None
        self._counts = Counter()

    def forward(self, microbatch, *_, kind="forward"):
        length = self._lengths(self._counts[kind])
        self._counts[kind] += 1
        self._world.compute((self.index, kind, length))
        return torch.zeros(length, requires_grad=True)

    def backward(self, microbatch, *_):
        return self.forward(microbatch, kind="backward")

    backward_input = backward

    def input_vjp(self, microbatch, gradients):
        return [(self.forward(microbatch, kind="vjp"),) for _ in gradients]

    def output_grads(self, microbatch, *_):
        return (self.forward(microbatch, kind="head"),)

    def backward_weight(self, microbatch, *_):
        self.forward(microbatch, kind="weight")

    head_backward = output_grads
    accumulate_grads = backward_weight

    def update(self):
        if self._in_flight is not None:
            self._in_flight.wait()
        self._world.compute((self.index, "update"))
        if self._replicas is not None:
            group, other, overlaps = self._replicas
            self._in_flight = group.exchange(other)
            if not overlaps:
                self._in_flight.wait()
                self._in_flight = None

    def take_last_read(self):
        return None  # nothing is measured

    def restart(self, policy):
        pass


class FakeSplitter:
    """The batch of a step, whose microbatches have the lengths of the first stage's forwards."""

    def __init__(self, lengths, shape, step):
        self._lengths, self._num_microbatches, self._step = lengths, shape.num_microbatches, step

    def find_input_error(self):
        return None

    def copy(self, microbatches):
        pass

    def inputs(self, microbatch):
        first = self._step * self._num_microbatches
        length = self._lengths(first + microbatch % self._num_microbatches)
        return torch.empty(length, device=META)

    def batch_meta(self, microbatch):
        return NO_BATCH

    def note_batch_meta(self, microbatch, batch):
        pass


def enqueue(
    schedule, shape, monkeypatch, *,
    groups=None, lengths=lambda nr: 1 + nr % 3, steps=STEPS, loads=False, via_host=False,
    overlaps=None,
):  # fmt: skip
    """Return the world of all ranks after they have run the steps of a schedule.

    ``overlaps``: whether the rounds of two replicas do; None: there is one replica.
    """
    has_replicas = overlaps is not None
    num_ranks = shape.num_ranks * (1 + has_replicas)
    world = World(num_ranks, connects=groups is None, loads=loads)

    def rank_of(group=None):
        return world.thread.rank

    def run(rank):
        is_ring = shape.num_stages > shape.num_ranks
        connected, replicas = groups and groups(world), None
        if has_replicas:
            other = (rank + shape.num_ranks) % num_ranks
            replicas = Group(world, "replicas", "nccl"), other, overlaps
            rank %= shape.num_ranks
        of_replica = Group(world, None, "nccl", shape.num_ranks)
        p2p = StageP2P(shape, connected or P2PGroups.connect(of_replica, META, is_ring=is_ring))
        last = shape.num_stages - 1
        stages = {s: FakeStage(s, world, lengths, s < last, replicas) for s in shape.stages(rank)}
        generators = StageGenerators(0, None, [])
        if isinstance(schedule, Interlocking):
            executor = InterlockingExecutor(
                stages, shape, p2p, rank, generators, schedule.reach(shape),
                2 * shape.num_microbatches, None,
            )  # fmt: skip
        else:
            executor = Executor(stages, shape, p2p, rank, generators)
        flushes = isinstance(schedule, Flushing)
        for step in range(steps):
            executor.train(
                lambda rank, step=step: schedule.step(shape, rank, step),
                FakeSplitter(lengths, shape, step),
                p2p.barrier if flushes else None, empty=flushes,
            )  # fmt: skip
            if flushes:
                executor.barrier(0)
        splitter = FakeSplitter(lengths, shape, steps)
        executor.train(lambda rank: schedule.drain(shape, rank, steps), splitter)
        executor.barrier(0)
        executor.restart(schedule.versions(shape))

    with monkeypatch.context() as patch:
        if not via_host:
            patch.setattr(stage_p2p, "_UPDATES_VIA_HOST", 0)
        patch.setenv("CUDA_MODULE_LOADING", "LAZY" if via_host else "EAGER")
        patch.setattr(dist, "get_rank", rank_of)
        patch.setattr(dist, "get_world_size", lambda group=None: shape.num_ranks)
        patch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
        world.run(run)
    return world


@pytest.mark.parametrize(("loading", "is_new"), [("LAZY", True), ("EAGER", False)])
def test_values_of_new_shapes_travel_through_the_host(loading, is_new, monkeypatch):
    """Until two updates for each stage later, as kernels may be loaded for them."""
    sent = []
    channel = SimpleNamespace(send=lambda *message, via_host, **_: sent.append(via_host))
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
    assert world.num_left() == [0, 0]
    assert {len(edges) for edges in world.edges.values()} == {1}  # a stream never holds two


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


def test_two_replicas_of_a_pipeline_complete(monkeypatch, subtests):
    """Also if kernels are loaded when they run first, which waits for the rounds too."""
    for schedule, shape, overlaps in [
        (OneForwardOneBackward(), PipelineShape(3, 4, 3), False),
        (PipeOptim(), PipelineShape(3, 3, 3), True),
        (PipeOptim(), PipelineShape(4, 2, 2), False),
        (PipeDream2BW(), PipelineShape(4, 4, 2), True),
    ]:
        with subtests.test(schedule=schedule, shape=shape, overlaps=overlaps):
            world = enqueue(schedule, shape, monkeypatch, overlaps=overlaps)
            assert world.num_left() == [0, 0]
            assert sum(index == "replicas" for index, *_ in world.sends) == 2 * shape.num_ranks
            options = {"loads": True, "lengths": lambda _: 1, "steps": 8, "via_host": True}
            world = enqueue(schedule, shape, monkeypatch, overlaps=overlaps, **options)
            assert not world.is_stuck
            assert world.num_left() == [0, 0]


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
                    if schedule.error_at(shape) is None:
                        with subtests.test(schedule=schedule, shape=shape):
                            check(schedule, shape, monkeypatch)


def world_that_loads(schedule, shape, new_each, monkeypatch, *, via_host=True):
    """Return the world where each kernel is loaded when it runs first, and shapes change.

    In turn (None), or after a phase of one shape: each so many microbatches have a new one.
    """
    one_shape = 2 * shape.num_stages * shape.num_microbatches

    def length(nr):
        if new_each is None:
            return 1 + nr % 3
        return nr if nr > one_shape and nr % new_each == 0 else 1

    return enqueue(
        schedule, shape, monkeypatch,
        lengths=length, steps=2 * shape.num_stages + 3, loads=True, via_host=via_host,
    )  # fmt: skip


def test_kernels_that_load_when_they_run_first_stop_no_pipeline(monkeypatch, subtests):
    """Loading waits for sends: all ranks come to wait for each other if none goes via the host."""
    for schedule, shape, new_each in [
        (ZeroBubble(), PipelineShape(4, 7, 2), 2),
        (XPipe("consistent"), PipelineShape(4, 3, 2), 2),
        (PipeOptim(), PipelineShape(6, 3, 3), 1),
        (PipeOptim(), PipelineShape(6, 3, 3), 3),
        (PipeDream(), PipelineShape(4, 2, 2), None),
    ]:
        with subtests.test(schedule=schedule, shape=shape, new_each=new_each):
            world = world_that_loads(schedule, shape, new_each, monkeypatch, via_host=False)
            assert world.is_stuck
            world = world_that_loads(schedule, shape, new_each, monkeypatch)
            assert not world.is_stuck
            assert world.num_left() == [0, 0]


@pytest.mark.slow
def test_kernels_that_load_when_they_run_first_stop_no_schedule(monkeypatch, subtests):
    """In a ring of three ranks the hosts of two may load kernels at once: see ``begin_step``."""
    for sizes in (
        *((3, 4, 3), (4, 2, 2), (4, 3, 2), (4, 5, 4), (4, 7, 2), (6, 3, 3), (6, 4, 2), (6, 6, 3)),
        *((8, 4, 4), (8, 5, 2), (9, 4, 3)),
    ):
        shape = PipelineShape(*sizes)
        for schedule, new_each in product(EVERY_SCHEDULE, (1, 2, 3, 5, None)):
            if schedule.error_at(shape) is None:
                with subtests.test(schedule=schedule, shape=shape, new_each=new_each):
                    world = world_that_loads(schedule, shape, new_each, monkeypatch)
                    assert not world.is_stuck
                    assert world.num_left() == [0, 0]


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
        for module in (p2p_channel, payloads):
            monkeypatch.setattr(module, "PREFETCH_DEPTH", num_posted)
        world = enqueue(
            OneForwardOneBackward(), PipelineShape(num_stages, 12, num_stages), monkeypatch,
            groups=two_groups, lengths=lambda _: 1,
        )  # fmt: skip
        assert world.num_early > 0
        left, left_eager = world.num_left()
        assert left == 0
        assert (left_eager > 0) is is_stuck, (num_posted, num_stages)
