"""Placements: which rank stores which rows."""

from itertools import pairwise, product

from pyparallel.subnets import Central, Sharded


def test_owners_have_all_rows_in_order(subtests):
    for placement, rows in product([Sharded(), Central(), Central(2)], [1, 2, 7, 12]):
        with subtests.test(f"{placement} {rows}"):
            owned = [placement.rows(rows, owner, 3) for owner in range(3)]
            assert [row for each in owned for row in each] == list(range(rows))
            assert all(a.stop == b.start for a, b in pairwise(owned))
