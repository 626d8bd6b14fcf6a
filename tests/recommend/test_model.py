"""The predicted step time, and the choice."""

import random

import pytest

from pyparallel.recommend import (
    NOISE,
    Compute,
    Cost,
    Link,
    StepTime,
    choose,
    predict,
    predict_outer,
)

LINK = Link(bytes_per_second=1e6, latency=0.01, num_ranks=4)


def cost(coding=0.0, wire_bytes=0.0, collectives=0, name="it"):
    return Cost(name, coding, wire_bytes, wire_bytes, collectives)


def equal(buckets, forward=0.0, backward=1.0):
    return Compute(forward, backward, (1 / buckets,) * buckets)


def test_communication_is_bytes_and_a_latency_for_each_collective():
    prediction = predict(cost(wire_bytes=2e6, collectives=5), equal(1), LINK)
    assert prediction.communication == pytest.approx(2.05)
    assert prediction.step == pytest.approx(1 + 2.05)  # nothing overlaps with one bucket


def test_equal_buckets_overlap(subtests):
    for buckets in [1, 2, 10]:
        for wire_bytes in [1e5, 9e5, 7e6]:
            with subtests.test(buckets=buckets, wire_bytes=wire_bytes):
                compute = equal(buckets, forward=0.5, backward=0.8)
                prediction = predict(cost(coding=0.2, wire_bytes=wire_bytes), compute, LINK)
                work, communication = 0.8 + 0.2, wire_bytes / 1e6
                expected = 0.5 + max(work, communication) + min(work, communication) / buckets
                assert prediction.step == pytest.approx(expected)


def test_the_last_buckets_communication_does_not_overlap():
    small_last = predict(cost(wire_bytes=5e5), Compute(0, 1, (0.9, 0.1)), LINK)
    large_last = predict(cost(wire_bytes=5e5), Compute(0, 1, (0.1, 0.9)), LINK)
    assert small_last.step == pytest.approx(0.9 + 0.45 + 0.05)
    assert large_last.step == pytest.approx(1 + 0.45)


def test_one_rank_does_not_communicate():
    alone = Link(1e6, 0.01, num_ranks=1)
    assert predict(cost(wire_bytes=1e9, collectives=9), equal(2), alone).step == pytest.approx(1)


def test_outer_steps_travel_beside_delayed_steps(subtests):
    """A local step takes 1 s; of 6 s on the link every 10 steps the rest is waited for."""
    for fragments, delay, waited in [(1, 0, 6), (3, 0, 6), (3, 1, 3), (3, 2, 0), (1, 5, 1)]:
        with subtests.test(fragments=fragments, delay=delay):
            compute, link = equal(2, forward=0.25, backward=0.75), Link(1e6, 0.0, 4)
            options = {"interval": 10, "fragments": fragments, "delay": delay}
            found = predict_outer(cost(coding=2.0, wire_bytes=6e6), compute, link, **options)
            assert found.step == pytest.approx(1 + (2 + waited) / 10)
            assert found.communication == pytest.approx(0.6)


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
    ((0.0, 0.1, 2), "bytes_per_second must be greater than 0, got 0.0"),
    ((1.0, -0.1, 2), "latency must not be negative, got -0.1"),
    ((1.0, 0.1, 0), "num_ranks must be a positive integer, got 0"),
    ((float("nan"), 0.1, 2), "bytes_per_second must be greater than 0, got nan"),
]


def test_impossible_links_are_refused(subtests):
    for arguments, sentence in BAD_LINKS:
        with (
            subtests.test(arguments=arguments, sentence=sentence),
            pytest.raises(ValueError, match=sentence),
        ):
            Link(*arguments)
