"""Errors of wrong types: one short sentence, without a tensor's values or an address."""

from collections import OrderedDict

import torch
from torch import nn

from pyparallel.comm import has_methods, summarize, wrong_type

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
        (SECRET, "a tensor of shape [2, 3]"),
        ({"ids": SECRET, "mask": 0}, "a dict with keys 'ids', 'mask'"),
        (OrderedDict(), "an empty OrderedDict"),
        ((SECRET, "x"), "a tuple of 2: a tensor of shape [2, 3], 'x'"),
        ([[SECRET]], "a list of 1: a list of 1: a tensor of shape [2, 3]"),
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
