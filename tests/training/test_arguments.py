"""Errors of wrong types: one short sentence, without a tensor's values or an address."""

import re
from collections import OrderedDict

import pytest
import torch
from torch import nn

from pyparallel.training import has_methods, summarize, wrong_type
from pyparallel.training.arguments import (
    check_callable,
    check_in,
    check_integer,
    check_one_of,
    check_type,
    require,
)

SECRET = torch.full((2, 3), 12345.0)


class Odd:
    """An object whose repr has a tensor's values."""

    def __repr__(self):
        return f"Odd({SECRET})"


def test_a_value_is_summarized_by_type_shape_and_keys():
    for value, text in [
        (None, "None"),
        ("ring", "'ring'"),
        (nn.Linear, "the class Linear"),
        (SECRET, "a tensor of shape [2, 3] and torch.float32"),
        ({"ids": SECRET, "mask": 0}, "a dict with keys 'ids', 'mask'"),
        (OrderedDict(), "an empty OrderedDict"),
        ((SECRET, "x"), "a tuple of 2: a tensor of shape [2, 3] and torch.float32, 'x'"),
        ([[SECRET]], "a list of 1: a list of 1: a tensor of shape [2, 3] and torch.float32"),
        (list(range(20)), "a list of 20: 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
        (nn.Linear(2, 3), "Linear(in_features=2, out_features=3, bias=True)"),
        (nn.Sequential(nn.ReLU()), "an object of Sequential"),
        (object(), "an object of object"),
        (Odd(), "an object of Odd"),
        (wrong_type, "the function wrong_type"),
        (nn.Linear(2, 3).parameters(), "the generator parameters"),
        ("x" * 500, "an object of str"),
    ]:
        found = summarize(value)
        assert found == text
        assert "12345" not in found
        assert " at 0x" not in found


def test_the_error_has_argument_rule_value_and_fix():
    for error, text in [
        (wrong_type("lr", "a number", "x"), "lr must be a number, got 'x'"),
        (wrong_type("lr", "a number", "x", "use 1"), "lr must be a number, got 'x'; use 1"),
        (
            wrong_type("model", "a module", nn.ReLU),
            "model must be a module, got the class ReLU; create an object, ReLU(...)",
        ),
    ]:
        assert (type(error), str(error)) == (TypeError, text)


def test_only_an_object_with_all_methods_has_them():
    assert has_methods([], "append", "pop")
    assert not has_methods([], "append", "get")
    assert not has_methods(list, "append")
    assert not has_methods(slice(3), "start")


def test_a_rule_that_holds_says_nothing():
    require([0], "x must not be empty", "")
    check_type("x", 1, int, "a number")
    check_callable("x", print, "a function")
    check_one_of("x", "a", ("a", "b"))
    for value, low in [(1, 1), (0, 0), (7, 7)]:
        check_integer("x", value, low)
    for value, interval in [(1, "(0, 1]"), (0.0, "[0, 1)"), (1e300, "(0, inf)")]:
        check_in("x", value, interval)


def test_a_broken_rule_is_one_sentence(subtests):
    for check, arguments, text in [
        (require, ([], "x must not be empty", "none"), "x must not be empty, got none"),
        (require, (0, "x must be even", 3, "take 4"), "x must be even, got 3; take 4"),
        (
            require,
            (0, "x must be a tensor", [SECRET]),
            "got a list of 1: a tensor of shape [2, 3] and torch.float32",
        ),
        (check_one_of, ("x", 2, (4, 8, 16)), "x must be 4, 8 or 16, got 2"),
        (check_integer, ("x", True), "x must be a positive integer, got True"),
        (check_integer, ("x", 1.0), "x must be a positive integer, got 1.0"),
        (check_integer, ("x", -1, 0), "x must be an integer of at least 0, got -1"),
        (check_integer, ("x", 0, 1, ">= 1 or None"), "x must be >= 1 or None, got 0"),
        (check_in, ("x", 0, "(0, 1]"), "x must be in (0, 1], got 0"),
        (check_in, ("x", 1.0, "[0, 1)"), "x must be in [0, 1), got 1.0"),
        (check_in, ("x", float("nan"), "[0, 1)"), "x must be in [0, 1), got nan"),
    ]:
        raises = pytest.raises(ValueError, match=f"{re.escape(text)}$")
        with subtests.test(text), raises:
            check(*arguments)
    for check, rest in [(check_type, (int, "a number")), (check_callable, ("a number",))]:
        with pytest.raises(TypeError, match="x must be a number, got 'y'"):
            check("x", "y", *rest)
