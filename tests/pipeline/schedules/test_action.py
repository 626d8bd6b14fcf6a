"""The notation of actions."""

import pytest

from pyparallel.pipeline import Action, Kind, parse_action


def test_notation_round_trip(subtests):
    for text in ["2F0", "0B7", "2I0", "2W0", "13U4095"]:
        with subtests.test(text=text):
            assert str(parse_action(text)) == text


def test_parsing():
    assert parse_action("2W10") == Action(2, Kind.BACKWARD_WEIGHT, 10)
    assert [kind.letter for kind in Kind] == ["F", "B", "I", "W", "U", "H", "L"]


def test_anything_else_is_refused_in_one_sentence(subtests):
    for text in ["", "2X0", "F0", "2F", "-1F0", "2F0 3F0", "2SEND_F0", "2f0"]:
        with (
            subtests.test(text=text),
            pytest.raises(ValueError, match=r"^an action must be a stage, .* as in 2F0, got '.*'$"),
        ):
            parse_action(text)
