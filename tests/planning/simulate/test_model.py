"""The recursion over arrays of ranks, beside an event loop of single messages; closed forms."""

import math
from dataclasses import replace

import numpy as np
import pytest

from pyparallel.gossip import (
    DPSGD,
    EASGD,
    OSGP,
    SGP,
    AllReduce,
    Hierarchical,
    LocalSGD,
    NoLoCo,
    SlowMo,
    SparseLoCo,
    StreamingDiLoCo,
)
from pyparallel.gossip.topology import (
    BaseGraph,
    Complete,
    HierarchicalTopology,
    Hypercube,
    Lazy,
    OnePeerExponential,
    Phases,
    RandomMatching,
    Ring,
    Star,
    Torus,
    mixing_curve,
)
from pyparallel.planning.simulate import Cost, Links, Profile, Stragglers, Uplink, simulate_run
from tests.planning.simulate.event_loop import EventLoop

BYTES = 60e6
BUCKET = 25 * 2**20
STEPS = 23


def of_message(links, topology, index, num_bytes):
    """Return the seconds of a message of a round, counted from the peers of all ranks."""
    n = topology.num_ranks
    sent = [(a, b) for a in range(n) for b in topology.out_peers(a, index)]

    def seconds(a, b):
        latency, rate = 0.0, math.inf
        for each in links.uplinks:
            of = each.ranks
            if a // of != b // of:
                leaves = sum(x // of == a // of != y // of for x, y in sent)
                enters = sum(y // of == b // of != x // of for x, y in sent)
                rate, latency = min(rate, each.rate / max(leaves, enters)), each.latency
        if (a, b) in links.slow_edges:
            rate = min(rate, links.slow_edges[a, b][0])
            latency = max(latency, links.slow_edges[a, b][1])
        return latency + num_bytes / rate

    return seconds


class Programs:
    """The programs of ranks: what one waits for in a step, as the papers and PyTorch have it."""

    def __init__(self, algorithm, n, links, profile, stragglers, seed):
        self.algorithm, self.n, self.links, self.profile = algorithm, n, links, profile
        factors = np.array([stragglers.slow.get(r, 1.0) * links.slow_ranks.get(r, 1.0)
                            for r in range(n)])  # fmt: skip
        factors *= max(1.0, links.ranks_per_machine / (links.cores or math.inf))
        computing = profile.computing * factors
        self.computing = [stragglers.draw(computing, seed, step) for step in range(STEPS)]
        self.loop = EventLoop(lambda key, a, b: self.messages[key](a, b))
        self.messages = {}

    def run(self):
        name = next(k.__name__ for k in type(self.algorithm).__mro__ if hasattr(self, k.__name__))
        program = getattr(self, name)
        return np.array(self.loop.run([program(rank) for rank in range(self.n)])).T

    def compute(self, rank, step):
        yield "compute", self.computing[step][rank]

    def update(self, rank, step):
        yield "compute", self.profile.stepping

    def post(self, rank, topology, index, num_bytes=BYTES):
        key = "round", index
        if key not in self.messages:
            at = topology.equivalent_round(index)
            self.messages[key] = of_message(self.links, topology, at, num_bytes)
        if self.is_complete(topology, index):
            yield self.join(("all", index), BYTES)
        else:
            yield "post", key, topology.out_peers(rank, index), topology.in_peers(rank, index)

    def wait(self, rank, topology, index):
        if self.is_complete(topology, index):
            yield "meet", ("all", index)
        else:
            yield "wait", ("round", index)

    def is_complete(self, topology, index):
        return np.allclose(topology.mixing_matrix(index), 1 / self.n)

    def join(self, key, num_bytes, ranks=None, channel="all"):
        ranks = ranks or range(self.n)
        seconds = self.links.all_reduce_seconds(num_bytes, self.n, len(ranks))
        return "join", key, ranks, seconds, channel

    def backward(self, rank, step, num_bytes, ranks):
        """Compute, with an all-reduce for each bucket; then wait for the last."""
        buckets = max(1, round(num_bytes / BUCKET))
        seconds, share = self.computing[step][rank], self.profile.forward_share
        yield "compute", seconds * share
        for bucket in range(buckets):
            yield "compute", seconds * (1 - share) / buckets
            if len(ranks) > 1:
                key = step, bucket, ranks[0]
                yield self.join(key, num_bytes / buckets, ranks, ("bucket", ranks[0]))
        if len(ranks) > 1:
            yield "meet", (step, buckets - 1, ranks[0])

    def AllReduce(self, rank):  # noqa: N802
        for step in range(STEPS):
            yield from self.backward(rank, step, BYTES, range(self.n))
            yield from self.update(rank, step)
            yield ("end",)

    def SGP(self, rank):  # noqa: N802
        topology, tau = self.algorithm.topology, self.algorithm.overlap
        sent, at = 0, -1
        for step in range(STEPS):
            yield from self.compute(rank, step)
            if sent and at is not None and step - at >= tau > 0:
                yield from self.wait(rank, topology, sent - 1)
                at = None
            yield from self.update(rank, step)
            if at is None or not sent:
                yield from self.post(rank, topology, sent)
                sent, at = sent + 1, step
            if tau == 0:
                yield from self.wait(rank, topology, sent - 1)
                at = None
            if step == STEPS - 1 and at is not None:
                yield from self.wait(rank, topology, sent - 1)
            yield ("end",)

    def OSGP(self, rank):  # noqa: N802
        topology, tau = self.algorithm.topology, self.algorithm.delay
        for step in range(STEPS):
            yield from self.compute(rank, step)
            yield from self.update(rank, step)
            if step % tau == 0:
                if step:
                    yield from self.wait(rank, topology, step // tau - 1)
                yield from self.post(rank, topology, step // tau)
            if step == STEPS - 1:
                yield from self.wait(rank, topology, step // tau)
            yield ("end",)

    def Hierarchical(self, rank):  # noqa: N802
        inner, group = self.algorithm.inner, self.algorithm.ranks_per_node
        first, local = rank - rank % group, rank % group
        node = range(first, first + group)
        nodes = inner.topology
        gather = self.links.all_reduce_seconds(BYTES / 2, self.n, group)
        outer = self

        class Shards:
            num_ranks = outer.n

            def out_peers(self, rank, index):
                peers = nodes.out_peers(rank // group, index)
                return tuple(peer * group + rank % group for peer in peers)

        for step in range(STEPS):
            yield from self.backward(rank, step, BYTES, node)
            yield from self.update(rank, step)
            key = "round", step
            at = nodes.equivalent_round(step)
            if key not in self.messages:
                self.messages[key] = of_message(self.links, Shards(), at, BYTES / group)
            out, in_ = nodes.out_peers(first // group, at), nodes.in_peers(first // group, at)
            yield "post", key, [p * group + local for p in out], [p * group + local for p in in_]
            yield "wait", key
            yield "join", ("gather", step, first), node, gather, ("gather", first)
            yield "meet", ("gather", step, first)
            yield ("end",)

    def Periodic(self, rank):  # noqa: N802
        options, in_flight, inner = self.algorithm, {}, 0
        fragments, ratio = options.num_fragments, getattr(self, "ratio", 1.0)
        for step in range(1, STEPS + 1):
            yield from self.compute(rank, step - 1)
            yield from self.update(rank, step - 1)
            if getattr(options, "inner", None) is not None:  # SGP without overlap
                yield from self.post(rank, options.inner.topology, inner)
                yield from self.wait(rank, options.inner.topology, inner)
                inner += 1
            for part in range(fragments):
                first = (part + 1) * options.interval // fragments
                if step >= first and (step - first) % options.interval == 0:
                    index = (step - first) // options.interval * fragments + part
                    if options.compressor is not None:
                        yield "compute", self.profile.encoding
                    if isinstance(options, NoLoCo):
                        yield from self.post(rank, options.topology, index, BYTES / fragments)
                    else:
                        yield self.join(("outer", index), BYTES * ratio / fragments)
                    in_flight[part] = step, index
                if part in in_flight and (
                    step - in_flight[part][0] >= options.delay or step == STEPS
                ):
                    yield from self.take(rank, in_flight.pop(part)[1])
            if step == STEPS:
                for _, index in in_flight.values():
                    yield from self.take(rank, index)
            yield ("end",)

    def take(self, rank, index):
        if isinstance(self.algorithm, NoLoCo):
            yield from self.wait(rank, self.algorithm.topology, index)
        else:
            yield "meet", ("outer", index)


def random_links(seed, n):
    random = np.random.default_rng(seed)
    machine = 2 if n % 2 == 0 else 1
    uplinks = [Uplink(1, random.uniform(1e9, 4e9), 1e-5)] if machine == 2 else []
    uplinks.append(Uplink(machine, random.uniform(5e7, 4e8), random.uniform(0, 5e-3)))
    if n % 4 == 0:
        uplinks.append(Uplink(n // 2, random.uniform(5e7, 4e8), 0.03))
    slow = {(int(a), int(b)): (random.uniform(1e7, 5e7), 0.05)
            for a, b in random.integers(0, n, (3, 2))}  # fmt: skip
    return Links(
        tuple(uplinks), slow, {0: 1.5}, len(uplinks) - 1 - (n % 4 == 0), [None, 1][seed % 2],
        ["ring", "tree"][seed % 2],
    )  # fmt: skip


def exponential(n):
    return OnePeerExponential(n)


CASES = [
    (8, AllReduce()),
    (8, SGP(exponential(8))),
    (7, SGP(exponential(7), overlap=1)),
    (9, SGP(OnePeerExponential(9, peers=2), overlap=3)),
    (8, SGP(HierarchicalTopology(8, 4), overlap=1)),
    (6, SGP(Lazy(Complete(6), 0.5))),
    (6, SGP(Phases([(Complete(6), 3), (Ring(6), 4)]), overlap=1)),
    (6, SGP(Star(6), overlap=2)),
    (6, SGP(Complete(6), overlap=1)),
    (8, DPSGD(Torus(8))),
    (9, DPSGD(BaseGraph(9), overlap=1)),
    (8, OSGP(exponential(8))),
    (5, OSGP(Ring(5), delay=3)),
    (8, LocalSGD(4)),
    (8, LocalSGD(6, fragments=3, delay=2)),
    (8, StreamingDiLoCo(9, compressor=None)),
    (7, NoLoCo(RandomMatching(7), 3)),
    (8, NoLoCo(Hypercube(8), 5, fragments=2, delay=2)),
    (6, SlowMo(SGP(Ring(6)), 4)),
    (8, Hierarchical(SGP(exponential(4)), 2)),
]


@pytest.mark.parametrize(("n", "algorithm"), CASES, ids=lambda each: str(each)[:40])
def test_the_recursion_is_the_event_loop(n, algorithm):
    for seed in range(3):
        links = random_links(seed, n)
        profile = Profile(0.2, 0.3, encoding=0.01, stepping=0.003)
        stragglers = Stragglers(0.3, {1: 2.0})
        run = simulate_run(
            algorithm, n, links, profile, BYTES, num_steps=STEPS, stragglers=stragglers, seed=seed
        )
        expected = Programs(algorithm, n, links, profile, stragglers, seed).run()
        np.testing.assert_allclose(run.times[1:], expected, rtol=1e-9, atol=1e-9)


def test_closed_forms():
    rate, latency, computing = 1e8, 1e-3, 0.5
    message = BYTES / rate + latency

    def seconds(algorithm, n=8, compute=computing, all_reduce="ring", size=BYTES):
        links, profile = Links.uniform(rate, latency, all_reduce), Profile(compute)
        return simulate_run(algorithm, n, links, profile, size, num_steps=100)

    # Buckets of 25 MiB: two of 30 MB, the first after half of backward.
    ring = 14 * (latency + BYTES / 2 / 8 / rate)
    assert seconds(AllReduce()).seconds == pytest.approx(computing * 2 / 3 + 2 * ring)
    small = seconds(AllReduce(), size=1e6)
    assert small.seconds == pytest.approx(computing + 14 * (latency + 1e6 / 8 / rate))
    tree = seconds(AllReduce(), size=1e6, all_reduce="tree")
    assert tree.seconds == pytest.approx(computing + 6 * latency + 14 * 1e6 / 8 / rate)
    assert small.card_bytes == pytest.approx(14 / 8 * 1e6)
    assert seconds(SGP(exponential(8))).seconds == pytest.approx(computing + message)
    two = seconds(SGP(Ring(8)))  # two messages share a card
    assert two.seconds == pytest.approx(computing + 2 * BYTES / rate + latency)
    assert two.card_bytes == pytest.approx(2 * BYTES)
    # Overlap hides what is shorter; the last message is waited for.
    hidden = seconds(SGP(exponential(8), overlap=1), compute=1.0)
    assert hidden.seconds == pytest.approx(1.0 + message / 100)
    assert hidden.waiting == pytest.approx(message / 100)
    exposed = seconds(SGP(exponential(8), overlap=1), compute=0.2)
    assert exposed.seconds == pytest.approx(message + 0.2 / 100)
    assert seconds(LocalSGD(10), size=1e6).seconds == pytest.approx(
        computing + 14 * (latency + 1e6 / 8 / rate) / 10
    )
    assert seconds(AllReduce(), n=1).seconds == pytest.approx(computing)
    assert seconds(SGP(exponential(1)), n=1).seconds == pytest.approx(computing)


def ring_by_messages(latencies, sending):
    """Return when all ranks have all sums: message by message, links send one at a time."""
    n = len(latencies)
    ready = np.zeros(n)
    free = np.zeros(n)
    for _ in range(2 * (n - 1)):
        begin = np.maximum(ready, free)  # each sends to the next one what it has received
        free = begin + sending
        ready = np.roll(free + latencies, 1)
    return ready.max()


def test_all_reduce_on_unequal_links():
    links = Links((Uplink(1, 1e10, 1e-5), Uplink(8, 1e9, 1e-3), Uplink(32, 1e8, 0.03)), card=1)
    # Two regions of four machines of eight ranks: log2 of each, up and down.
    expected = 2 * (3 * 1e-5 + 2 * 1e-3 + 0.03) + 2 * 63 / 64 * 64e6 / 1e8
    assert links.all_reduce_seconds(64e6, 64, 64) == pytest.approx(expected)
    within = 2 * (3 * 1e-5 + 2 * 1e-3) + 2 * 31 / 32 * 64e6 / 1e9
    assert links.all_reduce_seconds(64e6, 64, 32) == pytest.approx(within)
    assert links.all_reduce_seconds(64e6, 64, 8) == pytest.approx(6e-5 + 2 * 7 / 8 * 64e6 / 1e10)
    ring = replace(links, all_reduce="ring")
    for size in (1e3, 1e6, 1e9):
        crossing = np.arange(64) % 32 == 31, np.arange(64) % 8 == 7
        latencies, rates = (np.select(crossing, each[:2], each[2])
                            for each in ([0.03, 1e-3, 1e-5], [1e8, 1e9, 1e10]))  # fmt: skip
        expected = ring_by_messages(latencies, size / 64 / rates)
        assert ring.all_reduce_seconds(size, 64, 64) == pytest.approx(expected, rel=0.05)


def test_one_slow_rank_slows_all_reduce_at_once_and_gossip_in_time():
    links, profile = Links.uniform(1e9), Profile(0.1)
    stragglers = Stragglers(slow={0: 3.0})
    runs = [
        simulate_run(each, 16, links, profile, 1e5, num_steps=200, stragglers=stragglers)
        for each in (AllReduce(), SGP(exponential(16), overlap=1), LocalSGD(300))
    ]
    assert runs[0].seconds == pytest.approx(0.3, rel=0.01)
    assert runs[1].seconds == pytest.approx(0.3, rel=0.05)
    assert runs[2].seconds == pytest.approx((15 * 0.1 + 0.3) / 16)


def test_values_are_mixed_by_the_matrices_of_the_topology():
    links, profile = Links.uniform(1e9), Profile(0.1)
    for topology in (exponential(8), Star(6), Ring(9), BaseGraph(7), Lazy(Complete(5), 0.3)):
        n, steps = topology.num_ranks, 12
        run = simulate_run(SGP(topology), n, links, profile, 1e6, num_steps=steps)
        values = np.random.default_rng(0).standard_normal((n, 2))
        state = np.concatenate([values, np.ones((n, 1))], axis=1)
        for step in range(steps):
            state = topology.mixing_matrix(topology.equivalent_round(step)) @ state
        left = state[:, :2] / state[:, 2:] - values.mean(0)
        expected = np.linalg.norm(left) / np.linalg.norm(values - values.mean(0))
        assert run.mixing_errors[-1] == pytest.approx(expected, abs=1e-9)
        assert run.mixing_errors[0] == 1
    errors = [
        simulate_run(each, 8, links, profile, 1e6, num_steps=60).mixing_errors[-1]
        for each in (AllReduce(), LocalSGD(7), SGP(Complete(8)), NoLoCo(Hypercube(8), 4))
    ]
    assert max(errors) < 1e-12
    assert mixing_curve(exponential(8), 3)[-1] < 1e-9


def test_the_consensus_distance_of_local_steps_grows_with_their_root():
    links, profile = Links.uniform(1e9), Profile(0.1)
    found = [
        simulate_run(LocalSGD(h), 256, links, profile, 1e6, num_steps=500).consensus_distance
        for h in (4, 16, 64)
    ]
    # The distance after t steps is the root of t, but for the 256 ranks' own mean.
    expected = [np.sqrt(np.arange(h)).mean() for h in (4, 16, 64)]
    assert found == pytest.approx(expected, rel=0.3)


def test_a_compressor_shortens_messages_by_what_it_sends():
    links, profile = Links.uniform(1e8), Profile(0.0)
    dense, sparse = (
        simulate_run(each, 16, links, profile, BYTES, num_steps=60)
        for each in (LocalSGD(30), SparseLoCo(30))
    )
    # All ranks gather 14 bits for 64 of 4096 entries, which an all-reduce sends twice in float32.
    gathered = 15 * 14 * 64 / 4096 / 32
    assert sparse.card_bytes == pytest.approx(dense.card_bytes * gathered / (2 * 15 / 16), rel=0.05)


def test_what_is_not_simulated_is_refused():
    links, profile = Links.uniform(1e8), Profile(0.1)
    for algorithm, n, sentence in [
        (EASGD(3), 4, "or an SGP or OSGP in one of the last two, got .*: others are not simulated"),
        (SGP(Ring(4)), 6, "topology must be for the process group's 6 ranks"),
        (SGP(Ring(6000)), 4000, r"topology must be for 4000 ranks, got Ring\(6000\)"),
        (Hierarchical(SGP(Ring(2000)), 3), 4000, r"topology must be for 1333\.33 ranks, got Ri"),
        (Hierarchical(LocalSGD(3), 2), 4, "or an SGP or OSGP in one of the last two"),
        (SGP(Ring(4)), 0, "num_ranks must be a positive integer, got 0"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            simulate_run(algorithm, n, links, profile, 1e6)
    cost = Cost("bf16", 0.0, 1e6, 1e6, 1)
    with pytest.raises(
        ValueError, match="cost must come with AllReduce, LocalSGD or DiLoCo, which"
    ):
        simulate_run(SGP(Ring(4)), 4, links, profile, 1e6, cost=cost)
    with pytest.raises(ValueError, match="slow ranks must be from 0 to 3"):
        simulate_run(SGP(Ring(4)), 4, links, profile, 1e6, stragglers=Stragglers(slow={4: 2.0}))
