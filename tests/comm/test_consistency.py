"""Consistency checks: the same error on every rank, or none."""

import json
import math

import pytest
import torch
import torch.distributed as dist

from pyparallel.comm.consistency import (
    ArgumentTypeError,
    DisagreementError,
    check_consistent_across_ranks,
    error_of,
)
from pyparallel.comm.errors import PeerError
from tests.gossip import loops
from tests.workers import on_ranks


def check(rank, fields_of, problem_of):
    check_consistent_across_ranks(fields_of[rank], problem_of[rank])


SAME = [("size", "3"), ("kind", "a")]


WRONG = TypeError("topology must be an object, got 'ring'")
DISAGREES, WRONG_TYPE = "DisagreementError: ", "ArgumentTypeError: "
# The fields and the problem of each rank, and the error of all.
CASES = [
    ([SAME] * 3, [None] * 3, "None"),
    ([SAME] * 3, [None, None, "lr must be positive"], f"{DISAGREES}rank 2: lr must be positive"),
    ([SAME] * 3, ["a", None, "b"], f"{DISAGREES}rank 0: a; rank 2: b"),
    (
        [SAME, [("size", "4"), SAME[1]], SAME],
        [None] * 3,
        f"{DISAGREES}all ranks must have the same size, got 3 on rank 0 and 4 on rank 1",
    ),
    (
        [SAME, SAME, SAME[:1]],
        [None] * 3,
        f"{DISAGREES}all ranks must have the same number of fields, got 2 on rank 0 and 1 on rank",
    ),
    ([SAME] * 3, [WRONG] * 3, f"{WRONG_TYPE}ranks 0-2: {WRONG}"),
    ([SAME] * 3, [None, WRONG, None], f"{WRONG_TYPE}rank 1: {WRONG}"),
    ([SAME] * 3, [WRONG, "b", None], f"{DISAGREES}rank 0: {WRONG}; rank 1: b"),
]


def check_each(rank):
    return [loops.error_of(check, rank, fields, problems) for fields, problems, _ in CASES]


def test_all_ranks_raise_the_same_or_nothing(ranks):
    errors, *others = ranks.run(3, check_each)
    assert others == [errors] * 2
    for error, (*_, sentence) in zip(errors, CASES, strict=True):
        assert str(error).startswith(sentence), error
    assert issubclass(ArgumentTypeError, DisagreementError)
    assert issubclass(ArgumentTypeError, TypeError)


def test_each_sentence_is_stated_once_with_its_ranks():
    for problems, text in [
        (dict.fromkeys(range(8), "a"), "ranks 0-7: a"),
        ({3: "a"}, "rank 3: a"),
        (dict.fromkeys([0, 1, 2, 5, 7, 8], "a"), "ranks 0-2, 5, 7-8: a"),
        ({0: "a", 1: "b", 2: "a", 3: "b"}, "ranks 0, 2: a; ranks 1, 3: b"),
    ]:
        error = error_of(problems)
        assert (type(error), str(error)) == (DisagreementError, text)


@on_ranks(1)
def test_a_group_of_one_rank_is_consistent(rank):
    check_consistent_across_ranks(SAME, None)
    with pytest.raises(DisagreementError, match="rank 0: no"):
        check_consistent_across_ranks(SAME, "no")


MALFORMED = [  # the length that a rank sends, and its bytes
    (math.nan, b""),
    (2**48, b""),
    (-1, b""),
    (0, b""),
    (4, b"\xff\xfe\xfd\xfc"),
    (4, b"null"),
    (9, b"[null, 0,"),
    (13, b"[null, 0, [1]"),
    (15, b'["a", 0, [[1,2]]]'),
    (14, json.dumps([7, False, []]).encode()),
    (29, json.dumps([None, False, [["a", ["b"]]]]).encode()),
    (23, json.dumps([None, False, {"a": 1}]).encode()),
    (100_000, b"[" * 100_000),
]


def send_malformed(rank):
    """Rank 1 sends what this library never does; return each rank's errors of all cases."""
    errors = []
    for length, encoded in MALFORMED:
        try:
            if rank == 1:
                row = torch.tensor([-1.0, length, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
                rows = [torch.empty_like(row) for _ in range(2)]
                dist.all_gather(rows, row)
                longest = max(length, int(rows[0][1]))
                if 0 < length < 2**40:
                    padded = torch.frombuffer(bytearray(encoded.ljust(longest)), dtype=torch.uint8)
                    dist.all_gather([torch.empty_like(padded) for _ in range(2)], padded)
            else:
                check_consistent_across_ranks(SAME, None)
            errors.append("")
        except PeerError as error:
            errors.append(str(error))
    check_consistent_across_ranks(SAME, None)  # the group still works
    return errors


def test_malformed_arguments_of_a_rank_are_a_sentence_that_names_it(ranks):
    errors, _ = ranks.run(2, send_malformed)
    for error, (length, encoded) in zip(errors, MALFORMED, strict=True):
        assert "rank 0: all ranks must send their config fields as JSON" in error, (length, encoded)
        assert "got from rank 1 of the group" in error
        assert "the same version of pyparallel?" in error


def test_long_names_and_any_characters_are_compared(ranks):
    long = [("näme\ud800\n", "x" * 2**20), ("b", "")]
    ranks.run(2, check, [long] * 2, [None] * 2)
    for each in ranks.observe(2, check, [long, long[:1]], [None] * 2):
        assert "number of fields, got 2 on rank 0 and 1 on rank 1" in each.error
