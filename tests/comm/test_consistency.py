"""Consistency checks: the same error on every rank, or none."""

import pytest

from pyparallel.comm import DisagreementError, check_consistent_across_ranks


def check(rank, fields_of, problem_of):
    check_consistent_across_ranks(fields_of[rank], problem_of[rank])


SAME = [("size", "3"), ("kind", "a")]


def test_consistent_ranks_pass(ranks):
    ranks.run(3, check, [SAME] * 3, [None] * 3)


def test_all_ranks_raise_the_same(ranks):
    for fields_of, problem_of, sentence in [
        ([SAME] * 3, [None, None, "lr must be positive, got -1"], "rank 2: lr must be"),
        ([SAME] * 3, ["a", None, "b"], "rank 0: a; rank 2: b"),
        ([SAME, [("size", "4"), SAME[1]], SAME], [None] * 3, "size, got 3 on rank 0 and 4 on"),
        ([SAME, SAME, SAME[:1]], [None] * 3, "fields, got 2 on rank 0 and 1 on rank 2"),
    ]:
        errors = {each.error for each in ranks.observe(3, check, fields_of, problem_of)}
        assert len(errors) == 1, errors
        (error,) = errors
        assert error.startswith("DisagreementError: "), error
        assert sentence in error


def alone(rank):
    check_consistent_across_ranks(SAME, None)
    with pytest.raises(DisagreementError, match="rank 0: no"):
        check_consistent_across_ranks(SAME, "no")


def test_a_group_of_one_rank_is_consistent(ranks):
    ranks.run(1, alone)
