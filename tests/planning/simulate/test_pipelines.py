"""Pipelines with replicas: beside the compiled simulation, plain runs, and single messages."""

import math

import numpy as np
import pytest

from pyparallel.gossip import ADPSGD, SGP, AllReduce, Hierarchical, LeaderSGD, LocalSGD
from pyparallel.gossip.topology import Complete, OnePeerExponential, Ring
from pyparallel.pipeline import (
    Displacement,
    GPipe,
    Interlocking,
    Kind,
    OneForwardOneBackward,
    PipeDream2BW,
    PipelineShape,
    PipeOptim,
    ZeroBubble,
)
from pyparallel.pipeline.replicas import place_of_replicas
from pyparallel.planning.pipelines import Costs, simulate
from pyparallel.planning.simulate import (
    Cost,
    Failures,
    Links,
    Pipeline,
    Profile,
    Quadratic,
    Stragglers,
    Uplink,
    simulate_run,
)
from tests.pipeline.every_schedule import EVERY_SCHEDULE
from tests.planning.simulate.event_loop import EventLoop
from tests.planning.simulate.test_model import CASES, of_message, random_links

ALONE = SGP(Ring(1), overlap=1)
STARTED = PipeOptim(synchronous_updates=5)
SIZES = [(1, 1, 2), (3, 4, 5), (4, 3, 6), (8, 2, 4), (5, 9, 3)]  # stages, microbatches, steps


@pytest.mark.parametrize("schedule", [*EVERY_SCHEDULE, STARTED], ids=str)
def test_one_replica_is_the_compiled_simulation(schedule):
    for num_stages, microbatches, steps in SIZES:
        random = np.random.default_rng(num_stages)
        factors, latencies = random.uniform(0.5, 2, num_stages), random.uniform(0, 0.05, num_stages)
        slow_edges = {}
        for stage in range(num_stages - 1):
            edge = 1e7, float(latencies[stage])
            slow_edges[stage, stage + 1] = slow_edges[stage + 1, stage] = edge
        run = simulate_run(
            ALONE, num_stages, Links((Uplink(1, 1e8),), slow_edges),
            Profile(2.0, 0.3, stepping=0.05), 1e6, num_steps=steps,
            stragglers=Stragglers(slow=dict(enumerate(factors.tolist()))),
            pipeline=Pipeline(schedule, num_stages, microbatches, 2e5),
        )  # fmt: skip
        unit = 2.0 * factors / num_stages / microbatches
        costs = Costs(
            0.3 * unit, 0.7 * unit, 0.35 * unit, 0.35 * unit, update=0.05 / num_stages,
            communication=latencies + 2e5 / 1e7,
        )  # fmt: skip
        actions = schedule.actions(num_stages, microbatches, steps=steps)
        expected = simulate(actions, costs).makespan
        assert run.times.max() == pytest.approx(expected, rel=0, abs=1e-9)
        assert run.seconds * steps == pytest.approx(expected, rel=0, abs=1e-9)
        busy = 2.0 * factors.mean() / num_stages * steps
        updates = [each.kind is Kind.UPDATE for each in actions[0]].count(True)
        idle = expected - busy - 0.05 / num_stages * updates
        assert run.waiting * steps == pytest.approx(idle, abs=1e-9)


@pytest.mark.parametrize(
    ("schedule", "microbatches"), [(PipeOptim(), 1), (PipeDream2BW(), 3), (ZeroBubble(), 4)]
)
def test_one_stage_is_a_run_without_a_pipeline(schedule, microbatches):
    """Of gradients in one bucket: others are averaged during backward."""
    for number, (n, algorithm) in enumerate(CASES):
        if algorithm.error_at(place_of_replicas(schedule, n)):
            continue
        links, profile = random_links(number, n), Profile(0.2, 0.3, encoding=0.01, stepping=0.003)
        options = {"num_steps": 23, "stragglers": Stragglers(0.3, {1: 2.0}), "seed": number}
        plain = simulate_run(algorithm, n, links, profile, 2e7, **options)
        pipeline = Pipeline(schedule, 1, microbatches)
        run = simulate_run(algorithm, n, links, profile, 2e7, pipeline=pipeline, **options)
        for name in ("times", "mixing_errors", "consensus_distances", "card_bytes", "waiting"):
            found, expected = getattr(run, name), getattr(plain, name)
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9, err_msg=name)


STEPS, REPLICAS, STAGES, MICROBATCHES = 7, 2, 3, 4
RANKS = REPLICAS * STAGES
MODEL, ACTIVATION = 6e7, 5e5
OWN_LINKS = Links.uniform(1e8, 2e-3)
A_MACHINE_EACH = Links((Uplink(1, 1e9, 1e-5), Uplink(STAGES, 1e8, 2e-3)), card=1)
PAIRS = Links((Uplink(1, 1e9, 1e-5), Uplink(2, 1e8, 2e-3)), {(4, 1): (1e7, 0.0)}, card=1)


class Messages:
    """The messages of a round, or from one stage to another: of all ranks, as a topology."""

    num_ranks = RANKS

    def __init__(self, stage=None, to=None):
        self.stage, self.to = stage, to

    def out_peers(self, rank, index):
        if self.stage is None:
            return ((rank + STAGES) % RANKS,)
        return (rank - self.stage + self.to,) if rank % STAGES == self.stage else ()


class Programs:
    """What the trainer's ranks do: one action after the other."""

    def __init__(self, schedule, algorithm, links, computing):
        self.links, self.computing, self.algorithm = links, computing, algorithm
        self.actions = schedule.actions(STAGES, MICROBATCHES, steps=STEPS)
        round_seconds = of_message(links, Messages(), 0, MODEL / STAGES)
        self.loop = EventLoop(lambda key, a, b: round_seconds(a, b))

    def run(self):
        return np.array(self.loop.run([self.program(rank) for rank in range(RANKS)])).T

    def program(self, rank):
        replica, stage = divmod(rank, STAGES)
        update = 0
        for _, kind, m in self.actions[stage]:
            if kind is Kind.UPDATE:
                yield from self.update(rank, m // MICROBATCHES, update)
                update += 1
                if (m + 1) % MICROBATCHES == 0 and m + 1 < MICROBATCHES * STEPS:
                    yield ("end",)
                continue
            to_next, to_previous = (
                kind is Kind.FORWARD,
                kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT),
            )
            if to_next and stage > 0:
                yield "meet", ("F", replica, stage, m)
            if to_previous and stage < STAGES - 1:
                yield "meet", ("B", replica, stage, m)
            share = {Kind.FORWARD: 0.3, Kind.BACKWARD: 0.7}.get(kind, 0.35)
            seconds = self.computing[m // MICROBATCHES][rank]
            yield "compute", seconds / STAGES / MICROBATCHES * share
            if to_next and stage < STAGES - 1:
                yield self.send("F", rank, stage + 1, m)
            if to_previous and stage > 0:
                yield self.send("B", rank, stage - 1, m)
        own = range(replica * STAGES, (replica + 1) * STAGES)
        yield "join", ("ended", replica), own, 0.0, ("ended", replica)
        yield "meet", ("ended", replica)
        if getattr(self.algorithm, "overlap", 0):
            yield "wait", (stage, update - 1)
        yield ("end",)

    def send(self, letter, rank, to, m):
        replica, stage = divmod(rank, STAGES)
        seconds = of_message(self.links, Messages(stage, to), 0, ACTIVATION)
        return "send", (letter, replica, to, m), seconds(rank, rank - stage + to)

    def update(self, rank, step, update):
        replica, stage = divmod(rank, STAGES)
        peer = (rank + STAGES) % RANKS
        if self.algorithm.averages_gradients:
            own = range(replica * STAGES, (replica + 1) * STAGES)
            yield "join", ("ready", step, replica), own, 0.0, ("ready", replica)
            yield "meet", ("ready", step, replica)
            seconds = self.links.all_reduce_seconds(MODEL / STAGES, RANKS, REPLICAS, STAGES)
            yield "join", (step, stage), [rank, peer], seconds, stage
            yield "meet", (step, stage)
            yield "compute", 0.01 / STAGES
            return
        overlap = self.algorithm.overlap
        if overlap and update:
            yield "wait", (stage, update - 1)
        yield "compute", 0.01 / STAGES
        yield "post", (stage, update), [peer], [peer]
        if not overlap:
            yield "wait", (stage, update)


@pytest.mark.parametrize("algorithm", [SGP(Ring(2)), SGP(Ring(2), overlap=1), AllReduce()], ids=str)
@pytest.mark.parametrize("links", [OWN_LINKS, A_MACHINE_EACH, PAIRS])
def test_replicas_are_the_event_loop(links, algorithm):
    """The second replica computes three times as long."""
    stragglers = Stragglers(0.2, dict.fromkeys(range(STAGES, RANKS), 3.0))
    slow = np.repeat([1.0, 3.0], STAGES)
    profile = Profile(0.4, 0.3, stepping=0.01)
    for schedule in (GPipe(), OneForwardOneBackward(), ZeroBubble(), PipeOptim(), PipeDream2BW()):
        if algorithm.averages_gradients and not schedule.flushes:
            continue
        pipeline = Pipeline(schedule, STAGES, MICROBATCHES, ACTIVATION)
        run = simulate_run(
            algorithm, RANKS, links, profile, MODEL, num_steps=STEPS, stragglers=stragglers,
            seed=3, pipeline=pipeline,
        )  # fmt: skip
        computing = [stragglers.draw(0.4 * slow, 3, step) for step in range(STEPS)]
        expected = Programs(schedule, algorithm, links, computing).run()
        np.testing.assert_allclose(run.times[1:], expected, rtol=1e-9, atol=1e-9)


def test_closed_forms():
    """Four replicas of two stages, each in a machine of its own; two stages share a card."""
    links = Links((Uplink(1, 1e9), Uplink(2, 1e8, 1e-3)), card=1, all_reduce="ring")
    pipeline = Pipeline(GPipe(), 2, 4, 1e6)
    step = 5 / 4 * 0.2 + 2 * 1e6 / 1e9  # a microbatch more than four of 1/8 s; two messages wait

    def run(algorithm, links=links):
        return simulate_run(
            algorithm, 8, links, Profile(0.4), 8e6, num_steps=40, pipeline=pipeline,
            failures=Failures(600.0),
        )  # fmt: skip

    reduced = run(AllReduce())
    assert reduced.seconds == pytest.approx(step + 6 * (1e-3 + 4e6 / 4 / 5e7))
    assert reduced.card_bytes == pytest.approx(2 * 2 * 3 / 4 * 4e6)
    of_two = run(AllReduce(), Links((Uplink(1, 1e9), Uplink(4, 1e8, 1e-3)), card=1))
    assert of_two.card_bytes == pytest.approx(reduced.card_bytes)  # also from two replicas each
    tree = Links(links.uplinks, card=1)
    assert run(AllReduce(), tree).seconds == pytest.approx(step + 4e-3 + 6 * 4e6 / 4 / 5e7)
    gossip = run(SGP(OnePeerExponential(4)))
    assert gossip.seconds == pytest.approx(step + 1e-3 + 4e6 / 5e7)
    assert gossip.card_bytes == pytest.approx(8e6)
    assert gossip.goodput == reduced.goodput == pytest.approx(600 / (600 + 300 + 300))
    # With a card for each rank, what stages send counts: a message for each of four microbatches.
    one_each = run(SGP(OnePeerExponential(4)), Links.uniform(1e9))
    assert one_each.card_bytes == pytest.approx(4e6 + 4e6)


def test_gradients_of_several_buckets_are_averaged_after_the_backwards():
    links, pipeline = Links.uniform(1e8, 1e-3, "ring"), Pipeline(GPipe(), 1, 4)
    run = simulate_run(AllReduce(), 8, links, Profile(0.5), 6e7, num_steps=5, pipeline=pipeline)
    assert run.seconds == pytest.approx(0.5 + 14 * (1e-3 + 6e7 / 8 / 1e8))


def test_equal_replicas_on_fast_links_are_one(subtests):
    links, profile = Links.uniform(1e15), Profile(1.0)
    for schedule in EVERY_SCHEDULE:
        with subtests.test(schedule=schedule):
            pipeline = Pipeline(schedule, 4, 3)
            alone = simulate_run(ALONE, 4, links, profile, 1.0, num_steps=5, pipeline=pipeline)
            for algorithm in (SGP(Complete(5), overlap=2), LocalSGD(3)):
                run = simulate_run(
                    algorithm, 20, links, profile, 1.0, num_steps=5, pipeline=pipeline
                )
                np.testing.assert_allclose(run.times.T, np.tile(alone.times, 5).T, atol=1e-9)
                assert run.mixing_errors[-1] < 1e-9


def test_mistakes_are_refused_in_one_sentence():
    links, profile = Links.uniform(1e8), Profile(1.0)
    own = Pipeline(GPipe(), 4, 2)
    streaming = Pipeline(PipeOptim(), 4, 2)
    with pytest.raises(ValueError, match="num_ranks must be a multiple of 4 stages, got 10"):
        simulate_run(AllReduce(), 10, links, profile, 1.0, pipeline=own)
    for algorithm, pipeline, sentence in [
        (SGP(Ring(12)), own, r"replicas must be for the mesh's 3: topology must be .*Ring\(12\)"),
        (AllReduce(), streaming, "replicas must average weights with PipeOptim, .* no rank waits"),
        (Hierarchical(SGP(), 3), own, "replicas must average weights or gradients, not both"),
        (LeaderSGD(2), own, "algorithm must be one of AllReduce, .*: others are not simulated"),
        (ADPSGD(Ring(3)), own, "algorithm must be .* NoLoCo, SlowMo, .*got ADPSGD"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            simulate_run(algorithm, 12, links, profile, 1.0, pipeline=pipeline)
    for options, sentence in [
        ({"cost": Cost("bf16", 0.0, 1e6, 1e6, 1)}, "cost must come without a pipeline, got Pipe"),
        ({"objective": Quadratic(0.1)}, r"objective must come without a pipeline, got Pipeline\("),
    ]:
        with pytest.raises(ValueError, match=sentence):
            simulate_run(AllReduce(), 12, links, profile, 1.0, pipeline=own, **options)
    for arguments, error, sentence in [
        ((GPipe(), 0, 1), ValueError, "num_stages must be a positive integer, got 0"),
        ((GPipe(), 2, 1.5), ValueError, r"num_microbatches must be a positive integer, got 1\.5"),
        ((GPipe(), 2, 1, -1.0), ValueError, r"activation_bytes must be in \[0, inf\), got -1\.0"),
        ((GPipe(), 2, 1, math.nan), ValueError, "activation_bytes must be in .*, got nan"),
        (
            (GPipe, 2, 1),
            TypeError,
            r"schedule must be a schedule such as PipeOptim\(\), got the cl",
        ),
        ((Interlocking(1), 2, 1), ValueError, "schedule must be one with a single loss, got Inter"),
        (
            (PipeDream2BW(prediction=Displacement()), 8, 4),
            ValueError,
            "num_microbatches must be at least num_stages - 1 .*, got 4 for 8 stages",
        ),
    ]:
        with pytest.raises(error, match=sentence):
            Pipeline(*arguments)


class Crossed(GPipe):
    """Stages that wait for each other."""

    def order(self, shape, rank):
        kinds = Kind.FORWARD, Kind.BACKWARD
        return [(rank, kind, 0) for kind in (kinds if rank else reversed(kinds))]


def test_a_schedule_that_deadlocks_is_refused():
    pipeline = Pipeline(Crossed(), 2, 1)
    assert pipeline.shape == PipelineShape(2, 1, 2)
    with pytest.raises(ValueError, match="schedule must not deadlock, got Crossed"):
        simulate_run(ALONE, 2, Links.uniform(1e8), Profile(1.0), 1.0, pipeline=pipeline)
