"""Tables of text."""

from pyparallel.cli.text_table import aligned


def test_the_first_column_is_flush_left_and_the_others_right():
    assert aligned([("a", "bb"), ("ccc", "d")]) == ["a    bb", "ccc   d"]
