"""The race of schedules against the clock: each entry trains the whole model."""

import pytest

from benchmarks.harness.pictures import drawn
from benchmarks.harness.rows import read_rows, write_rows
from benchmarks.pipeline.clock import FIELDS, Entry, race, rows_of
from benchmarks.pipeline.picture import PICTURES
from benchmarks.pipeline.systems.peers import ONE_FORWARD_ONE_BACKWARD, ZERO_BUBBLE
from benchmarks.pipeline.table import race as table_of_race

ENTRIES = [
    Entry(None, "muon", 0.01, turn=10),
    Entry(ONE_FORWARD_ONE_BACKWARD, "muon", 0.01, 4, turn=5),
    Entry(ZERO_BUBBLE, "adamw", 0.01, 4, turn=5),
]


def work(rank):
    return race(rank, ENTRIES, 2, seed=3)


@pytest.mark.slow  # 10 seconds
def test_all_entries_begin_with_the_same_weights_and_learn(ranks, tmp_path):
    points, others = ranks.run(2, work, time_limit=120)
    assert [[each[:2] for each in of] for of in points] == [
        [each[:2] for each in of] for of in others
    ]
    assert len({of_entry[0][2] for of_entry in points}) == 1
    for entry, of_entry in zip(ENTRIES, points, strict=True):
        assert [updates for updates, *_ in of_entry] == [0, entry.turn, 2 * entry.turn]
        assert of_entry[-1][2] < of_entry[1][2] < of_entry[0][2]
        assert 0 < of_entry[1][1] < of_entry[2][1]
    write_rows(list(rows_of(ENTRIES, points, 3)), tmp_path / "rows.csv", FIELDS)
    rows = read_rows(tmp_path / "rows.csv")
    assert table_of_race(rows).count("\n") == 5
    assert drawn(PICTURES, rows, tmp_path) == ["race"]
