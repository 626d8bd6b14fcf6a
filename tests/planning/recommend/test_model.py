"""The predicted step time, beside formulas of it, and the choice."""

import random

import numpy as np
import pytest

from pyparallel.compression import Cast
from pyparallel.gossip import SGP, AllReduce, DiLoCo
from pyparallel.gossip.topology import OnePeerExponential
from pyparallel.planning.recommend import NOISE, Link, StepTime, choose, predict
from pyparallel.planning.simulate import Cost, Profile, Stragglers

LINK = Link(bytes_per_second=1e6, latency=0.01, num_ranks=4)
FAST = Link(bytes_per_second=1e6, latency=0.0, num_ranks=4)


def cost(coding=0.0, wire_bytes=0.0, collectives=1, name="it", buckets=(1.0,)):
    return Cost(name, coding, wire_bytes, wire_bytes, collectives, buckets)


def profile(forward=0.0, backward=1.0):
    return Profile(forward + backward, forward / (forward + backward))


def test_communication_is_bytes_and_a_latency_for_each_collective():
    prediction = predict(cost(wire_bytes=2e6, collectives=5), profile(), LINK, AllReduce())
    assert prediction.communication == pytest.approx(2.05)
    assert prediction.step == pytest.approx(1 + 2.05)  # nothing overlaps with one bucket
    assert prediction.waiting == pytest.approx(2.05 / 3.05)


def test_equal_buckets_overlap(subtests):
    for buckets in [1, 2, 10]:
        for wire_bytes in [1e5, 9e5, 7e6]:
            with subtests.test(buckets=buckets, wire_bytes=wire_bytes):
                given = cost(0.2, wire_bytes, buckets=(1 / buckets,) * buckets)
                prediction = predict(given, profile(forward=0.5, backward=0.8), FAST, AllReduce())
                work, communication = 0.8 + 0.2, wire_bytes / 1e6
                expected = 0.5 + max(work, communication) + min(work, communication) / buckets
                assert prediction.step == pytest.approx(expected)


def test_the_last_buckets_communication_does_not_overlap():
    small_last = predict(cost(wire_bytes=5e5, buckets=(0.9, 0.1)), profile(), FAST, AllReduce())
    large_last = predict(cost(wire_bytes=5e5, buckets=(0.1, 0.9)), profile(), FAST, AllReduce())
    assert small_last.step == pytest.approx(0.9 + 0.45 + 0.05)
    assert large_last.step == pytest.approx(1 + 0.45)


@pytest.mark.slow
def test_unequal_buckets_are_sent_one_after_the_other():
    draw = np.random.default_rng(0)
    for _ in range(20):
        shares = draw.dirichlet(np.ones(draw.integers(1, 9)))
        coding, backward, num_bytes = draw.uniform(0, 1, 3)
        collectives = int(draw.integers(1, 30))
        computed = sent = 0.0
        for share in shares:
            computed += share * (backward + coding)
            sent = max(sent, computed) + share * (num_bytes + 0.01 * collectives)
        given = cost(coding, 1e6 * num_bytes, collectives, buckets=tuple(shares))
        found = predict(given, profile(0.3, backward), LINK, AllReduce())
        assert found.step == pytest.approx(0.3 + sent)


def test_one_rank_does_not_communicate():
    alone = Link(1e6, 0.01, num_ranks=1)
    given = cost(wire_bytes=1e9, collectives=9, buckets=(0.5, 0.5))
    assert predict(given, profile(), alone, AllReduce()).step == pytest.approx(1)


def test_outer_steps_travel_beside_delayed_steps(subtests):
    """A local step takes 1 s; of 6 s on the link every 10 steps the rest is waited for."""
    for fragments, delay, waited in [(1, 0, 6), (3, 0, 6), (3, 1, 3), (3, 2, 0), (1, 5, 1)]:
        with subtests.test(fragments=fragments, delay=delay):
            algorithm = DiLoCo(10, fragments=fragments, delay=delay, compressor=Cast())
            given = cost(coding=2.0, wire_bytes=6e6)
            found = predict(given, profile(0.25, 0.75), FAST, algorithm)
            assert found.step == pytest.approx(1 + (2 + waited) / 10)
            assert found.communication == pytest.approx(0.6)


def test_a_message_of_gossip_travels_beside_a_step(subtests):
    for num_bytes, waited in [(4e5, 0), (3e6, 2)]:
        with subtests.test(num_bytes=num_bytes):
            algorithm = SGP(OnePeerExponential(4), overlap=1)
            found = predict(cost(wire_bytes=num_bytes), profile(0.25, 0.75), FAST, algorithm)
            assert found.step == pytest.approx(1 + waited)


def test_all_wait_for_the_slowest_before_they_average_gradients():
    law, given = Stragglers(0.3), cost(wire_bytes=1.0)
    found = {
        algorithm: predict(given, profile(), FAST, algorithm, law).step
        for algorithm in (AllReduce(), SGP(OnePeerExponential(4), overlap=1), DiLoCo(200))
    }
    draws = np.exp(0.3 * np.random.default_rng(0).standard_normal((10_000, 4)))
    slowest, mean = draws.max(1).mean(), draws.mean()
    of_all, of_pairs, of_outer = found.values()
    assert of_all == pytest.approx(slowest, rel=0.05)
    assert mean < of_outer < 1.1 * mean < of_pairs < slowest


def steps(*seconds):
    return [StepTime(cost(name=str(i)), 0.0, each) for i, each in enumerate(seconds)]


CHOICES = [
    ([1.0], 0),
    ([1.0, 0.9], 1),
    ([1.0, 0.96], 0),
    ([1.0, 1.2, 0.9], 2),
    ([1.0, 0.5, 0.49, 0.48], 1),
    ([1.0, 0.5, 0.49, 0.4], 3),
    ([1.0, 2.0, 3.0], 0),
]


def test_the_fastest_is_chosen_if_it_beats_all_simpler_ones(subtests):
    for seconds, chosen in CHOICES:
        with subtests.test(seconds=seconds, chosen=chosen):
            assert choose(steps(*seconds)).name == str(chosen)


def test_the_choice_beats_all_simpler_ones_by_more_than_the_noise():
    draw = random.Random(0)
    for _ in range(300):
        predictions = steps(*(draw.uniform(0.8, 1.2) for _ in range(6)))
        best = choose(predictions)
        simpler = predictions[: predictions.index(best)]
        assert all(best.step < (1 - NOISE) * each.step for each in simpler)


BAD_LINKS = [
    ((0.0, 0.1, 2), "bytes_per_second must be greater than 0 and finite, got 0.0"),
    ((1.0, -0.1, 2), "latency must be finite and not negative, got -0.1"),
    ((1.0, 0.1, 0), "num_ranks must be a positive integer, got 0"),
    ((float("nan"), 0.1, 2), "bytes_per_second must be greater than 0 and finite, got nan"),
]


def test_impossible_links_are_refused(subtests):
    for arguments, sentence in BAD_LINKS:
        with (
            subtests.test(arguments=arguments, sentence=sentence),
            pytest.raises(ValueError, match=sentence),
        ):
            Link(*arguments)
