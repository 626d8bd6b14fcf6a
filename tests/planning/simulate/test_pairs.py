"""AD-PSGD beside a loop over moments that recomputes every message's rate; its closed forms."""

import numpy as np
import pytest

from pyparallel.gossip import ADPSGD, AllReduce
from pyparallel.gossip.algorithms.partners import Partners
from pyparallel.gossip.topology import BipartiteExponential, Edges, Ring, Star, Torus
from pyparallel.planning.simulate import Links, Profile, Quadratic, Stragglers, Uplink, simulate_run

BYTES = 60e6


class Moments:
    """All ranks and messages from one moment at which something ends to the next.

    They train by SGD, each step with the gradient at what the rank held when it began to compute.
    """

    def __init__(self, algorithm, n, links, profile, stragglers, seed, objective):
        self.partners, self.n, self.links = Partners(algorithm.topology, algorithm.seed), n, links
        self.profile, self.stragglers, self.seed = profile, stragglers, seed
        self.factors = links.computing(n)
        for rank, factor in stragglers.slow.items():
            self.factors[rank] *= factor
        self.now, self.messages, self.flags, self.replied = 0.0, [], [], {}
        # What each rank holds of each rank's first value, and its parameters.
        self.x = np.hstack([np.eye(n), np.zeros((n, objective.dimension))])
        self.lr, self.shards = objective.learning_rate, objective.divide(n, seed)
        self.ends = [[0.0] for _ in range(n)]

    def run(self, steps):
        programs = [self.program(rank) for rank in range(self.n)]
        awaited = [next(each) for each in programs]
        while True:
            ready = [rank for rank in range(self.n) if self.is_over(awaited[rank])]
            for rank in ready:
                awaited[rank] = next(programs[rank])
                if sum(map(len, self.ends)) == self.n * (steps + 1):
                    return
            if not ready:
                self.advance([each for each in awaited if isinstance(each, float)])

    def is_over(self, awaited):
        return awaited <= self.now if isinstance(awaited, float) else awaited["left"] == 0

    def advance(self, times):
        sending = [each for each in self.messages if each["left"] > 0 and each["bytes"] > 0]
        senders, receivers = (np.array([each[end] for each in sending], int) for end in "ab")
        edges = Edges(senders, receivers, np.zeros(len(sending)), np.zeros(self.n))
        latencies = self.links.seconds(edges, 0.0, self.n)
        rates = BYTES / (self.links.seconds(edges, BYTES, self.n) - latencies)
        late = [each for each in self.messages if each["bytes"] == 0 and each["left"] > 0]
        whole = [each["bytes"] / rate for each, rate in zip(sending, rates, strict=True)]
        seconds = min([*(t - self.now for t in times), *whole, *(m["left"] for m in late)])
        ends = [t for t in times if t - self.now == seconds]
        self.now = ends[0] if ends else self.now + seconds
        for each, rate, latency, last in zip(sending, rates, latencies, whole, strict=True):
            each["bytes"] = 0 if last == seconds else each["bytes"] - rate * seconds
            each["left"] = latency if last == seconds else 1
        for each in late:
            each["left"] = 0 if each["left"] == seconds else each["left"] - seconds

    def send(self, a, b):
        self.messages = [each for each in self.messages if each["left"] > 0]
        self.messages.append({"a": a, "b": b, "bytes": BYTES, "left": 1})
        return self.messages[-1]

    def program(self, rank):
        requests, in_flight, must_accept, accepted, sent, pending = 0, None, False, None, [], []
        answered, profile = False, self.profile
        step = 0
        while True:
            computing = self.stragglers.draw(profile.computing * self.factors, self.seed, step)
            a, b = self.shards.curvatures[rank], self.shards.minima[rank]
            gradient = a * (self.x[rank, self.n :] - b) + self.shards.draw(step)[rank]
            yield float(self.now + computing[rank])
            if answered:
                yield self.replied[rank][1]
                self.x[rank] -= self.replied.pop(rank)[2] / 2
                in_flight, answered = None, False
            if accepted is not None:
                (peer, request), message = accepted
                yield message
                difference = request - self.x[rank]
                self.x[rank] += difference / 2
                sent.append(self.send(rank, peer))
                self.replied[peer] = self.now, sent[-1], difference
                accepted = None
            self.x[rank, self.n :] -= self.lr * gradient
            yield float(self.now + profile.stepping)
            answered = rank in self.replied and self.replied[rank][0] < self.now
            seen = [f for f in self.flags if f[1] == rank and f[0] < self.now]
            self.flags = [f for f in self.flags if f not in seen]
            pending += [f[2] for f in sorted(seen, key=lambda f: f[2][0])]
            active = self.partners.passive_neighbors(rank)
            if in_flight is None and pending and (must_accept or not active):
                if len(sent) > 1:
                    yield sent[-2]
                request = pending.pop(0)
                accepted = request, self.send(request[0], rank)
                must_accept = False
            elif in_flight is None and active:
                in_flight = self.partners.choose(rank, requests)
                requests, must_accept = requests + 1, True
                self.flags.append((self.now, in_flight, (rank, tuple(self.x[rank]))))
            self.ends[rank].append(self.now)
            step += 1


REGIONS = Links(
    (Uplink(1, 1e9, 1e-5), Uplink(2, 2e8, 2e-3), Uplink(6, 1.5e8, 0.03)),
    {(0, 1): (3e7, 0.05)}, {2: 1.5}, card=1,
)  # fmt: skip


@pytest.mark.parametrize("links", [Links.uniform(4e8, 1e-3), Links.uniform(6e7), REGIONS])
@pytest.mark.parametrize("topology", [Ring(12), Torus(12), Star(12), BipartiteExponential(12)])
def test_events_are_those_of_every_moment(topology, links):
    algorithm, profile = ADPSGD(topology, seed=3), Profile(0.2, stepping=0.003)
    stragglers, objective = Stragglers(0.3, {1: 3.0}), Quadratic(0.3, 4, noise=0.2)
    run = simulate_run(
        algorithm, 12, links, profile, BYTES,
        num_steps=30, stragglers=stragglers, seed=5, objective=objective,
    )  # fmt: skip
    expected = Moments(algorithm, 12, links, profile, stragglers, 5, objective)
    expected.run(30)
    for ends, times in zip(expected.ends, run.times.T, strict=True):
        np.testing.assert_allclose(times[~np.isnan(times)], ends, rtol=1e-9)
    assert run.seconds == pytest.approx(expected.now / 30, rel=1e-9)
    assert 0 <= run.waiting < run.seconds
    for rank, (_, _, difference) in expected.replied.items():
        expected.x[rank] -= difference / 2
    np.testing.assert_allclose(run.parameters, expected.x[:, 12:], rtol=1e-9, atol=1e-9)
    assert run.losses[-1] == pytest.approx(expected.shards.loss(run.parameters.mean(0)))
    x = expected.x[:, :12]
    np.testing.assert_allclose(x.sum(0), 1.0, atol=1e-12)  # no mass is lost
    first = np.random.default_rng(5).standard_normal((12, 2))
    last = x @ first
    error = np.sqrt(((last - first.mean(0)) ** 2).mean() / ((first - first.mean(0)) ** 2).mean())
    assert run.mixing_errors[-1] == pytest.approx(error, rel=1e-9)


def test_no_rank_waits_for_a_slow_one():
    links, profile = Links.uniform(1e9), Profile(0.1)
    slow = Stragglers(0.01, {0: 5.0})
    pairs, reduced = (
        simulate_run(each, 16, links, profile, 1e5, num_steps=100, stragglers=slow)
        for each in (ADPSGD(Ring(16)), AllReduce())
    )
    assert reduced.seconds == pytest.approx(0.5, rel=0.02)
    # The others take 5 steps for one of rank 0's: 16 / 15.2 of the time of 16 equal ranks.
    assert pairs.seconds == pytest.approx(0.1 * 16 / 15.2, rel=0.02)
    assert pairs.waiting < 1e-3
    taken = (~np.isnan(pairs.times)).sum(0) - 1
    assert taken[1:].min() > 4.8 * taken[0]
    assert taken.sum() == pytest.approx(1600, abs=1)


def test_a_request_and_its_reply_share_no_direction_of_a_card():
    """Two ranks: an exchange takes three steps, and sends the model in each direction."""
    run = simulate_run(
        ADPSGD(Ring(2)), 2, Links.uniform(1e9), Profile(0.1), 1e7, num_steps=300,
        stragglers=Stragglers(0.01),
    )  # fmt: skip
    assert run.seconds == pytest.approx(0.1, rel=0.01)
    assert run.mixing_errors[-1] < 1e-9
    assert 1e7 / 4.5 < run.card_bytes < 1e7 / 2


def test_one_rank_alone_computes():
    run = simulate_run(ADPSGD(Ring(1)), 1, Links.uniform(1e9), Profile(0.1), 1e7, num_steps=5)
    assert run.seconds == pytest.approx(0.1)
    assert run.card_bytes == 0.0
