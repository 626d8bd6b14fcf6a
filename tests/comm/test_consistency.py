"""Consistency checks: the same error on every rank, or none."""

import pytest

from pyparallel.comm import DisagreementError, check_consistent_across_ranks
from tests.workers import observe_ranks, run_ranks


def check(rank, fields_of, problem_of):
    check_consistent_across_ranks(fields_of[rank], problem_of[rank])


SAME = [("size", "3"), ("kind", "a")]


def test_consistent_ranks_pass():
    run_ranks(3, check, [SAME] * 3, [None] * 3)


@pytest.mark.parametrize(
    ("fields_of", "problem_of", "sentence"),
    [
        ([SAME] * 3, [None, None, "lr must be positive, got -1"], "rank 2: lr must be"),
        ([SAME] * 3, ["a", None, "b"], "rank 0: a; rank 2: b"),
        ([SAME, [("size", "4"), SAME[1]], SAME], [None] * 3, "size, got 3 on rank 0 and 4 on"),
        ([SAME, SAME, SAME[:1]], [None] * 3, "fields, got 2 on rank 0 and 1 on rank 2"),
    ],
)  # fmt: skip
def test_all_ranks_raise_the_same(fields_of, problem_of, sentence):
    outcomes = observe_ranks(3, check, fields_of, problem_of, group_timeout=20)
    assert len({outcome.error for outcome in outcomes}) == 1
    assert outcomes[0].error.startswith("DisagreementError: ")
    assert sentence in outcomes[0].error


def alone(rank):
    check_consistent_across_ranks(SAME, None)
    with pytest.raises(DisagreementError, match="rank 0: no"):
        check_consistent_across_ranks(SAME, "no")


def test_a_group_of_one_rank_is_consistent():
    run_ranks(1, alone)
