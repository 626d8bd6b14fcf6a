"""PipeMare's corrections: the learning rate of a stage, and the weights a backward reads."""

import pytest

from pyparallel.pipeline import PipelineShape, PipeMare

FACTORS = [
    (0, [1 / 4, 1 / 4**0.75, 1 / 4**0.5, 1 / 4**0.25, 1, 1]),
    (2, [1 / 2, 1 / 2**0.75, 1 / 2**0.5, 1 / 2**0.25, 1, 1]),
    (3, [1] * 6),
    (4, [1] * 6),
]


def test_the_rate_is_divided_by_a_power_of_the_delay(subtests):
    for stage, factors in FACTORS:
        with subtests.test(stage=stage, factors=factors):
            schedule = PipeMare(annealing=4)
            got = [
                schedule.rate_factor(PipelineShape(5, 8, 5), stage, update) for update in range(6)
            ]
            assert got == pytest.approx(factors)


def test_without_annealing_rates_do_not_change():
    assert PipeMare().rate_factor(PipelineShape(5, 8, 5), 0, 0) == 1
