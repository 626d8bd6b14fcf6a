import re
from collections import UserDict
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._pytree import tree_flatten

from pyparallel.pipeline.runtime.inputs import (
    Arguments,
    PreSplit,
    batch_of_call,
    call_module,
    input_tensors,
)
from pyparallel.pipeline.runtime.microbatches import MicrobatchSplitter


def test_splits_like_tensor_split_and_counts_from_first():
    splitter = MicrobatchSplitter(torch.arange(10), (torch.arange(10), torch.ones(10, 2)), 8, 4)
    assert [splitter.inputs(8 + each).tolist() for each in range(4)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7],
        [8, 9],
    ]
    assert splitter.target(11)[1].shape == (2, 2)
    assert [splitter.share(8 + each) for each in range(4)] == [0.3, 0.3, 0.2, 0.2]


class Recorder(nn.Module):
    def forward(self, *args, **kwargs):
        return args, kwargs


def shared_mask():
    return create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")


SAMPLES, NESTED = torch.arange(7), {"a": [torch.ones(7, 2), (torch.zeros(7), "text")]}
ARGUMENTS = [  # as torch's schedules take them: step(*args, **kwargs)
    ([SAMPLES], {}),
    ([SAMPLES, None, True, 3, "text", torch.ones(7, 3)], {}),
    ([NESTED, SAMPLES], {}),
    ([(SAMPLES, SAMPLES)], {}),
    ([], {"input_ids": SAMPLES, "mask": None, "nested": NESTED, "block": shared_mask()}),
]


def test_a_list_or_a_dict_is_split_into_arguments_as_torch_does(subtests):
    for args, kwargs in ARGUMENTS:
        with subtests.test(args=len(args), kwargs=list(kwargs)):
            splitter = MicrobatchSplitter(args or kwargs, None, 4, 3)
            expected = zip(*split_args_kwargs_into_chunks(tuple(args), kwargs, 3), strict=True)
            for microbatch, wanted in enumerate(expected, 4):
                found = call_module(Recorder(), splitter.inputs(microbatch))
                (left, structure), (right, wanted_structure) = map(tree_flatten, (found, wanted))
                assert structure == wanted_structure
                for a, b in zip(left, right, strict=True):
                    assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a is b
                count = sum(isinstance(each, torch.Tensor) for each in left)
                assert len(input_tensors(splitter.inputs(microbatch))) == count


def test_a_tuple_is_one_argument_and_a_mapping_is_a_dict():
    pair = (SAMPLES, torch.ones(7, 2))
    ((value,), kwargs) = call_module(Recorder(), MicrobatchSplitter(pair, None, 0, 3).inputs(2))
    assert [each.tolist() for each in value] == [[5, 6], [[1, 1], [1, 1]]]
    assert kwargs == {}
    tokens = UserDict(input_ids=SAMPLES)  # as a tokenizer returns
    args, kwargs = call_module(Recorder(), MicrobatchSplitter(tokens, None, 0, 3).inputs(0))
    assert (args, list(kwargs)) == ((), ["input_ids"])


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def test_a_target_keeps_its_structure():
    for target in (
        SAMPLES,
        (SAMPLES, SAMPLES),
        [SAMPLES, SAMPLES],
        {"a": SAMPLES, "b": [SAMPLES]},
        Pair(SAMPLES, SAMPLES),
    ):
        splitter = MicrobatchSplitter(None, target, 3, 3)
        assert splitter.find_target_error() is None
        found = splitter.target(4)
        assert type(found) is type(target)
        leaves, structure = tree_flatten(found)
        assert structure == tree_flatten(target)[1]
        assert all(leaf.tolist() == [3, 4] for leaf in leaves)
        assert splitter.share(3) == 3 / 7


SPLIT_RULE = "inputs must be a tensor, a tuple of tensors, a list of arguments or a dict of keyword"
ONE_NUMBER = "must have one number of samples, at least one for each of the 4 microbatches, got"
BAD_INPUTS = [
    (None, "inputs must be given on the rank of the first stage, got None$"),
    (7, TypeError(f"{SPLIT_RULE}.*got 7$")),
    ("text", TypeError(f"{SPLIT_RULE}.*got 'text'$")),
    ((), TypeError(f"{SPLIT_RULE}.*got an empty tuple")),
    ((torch.full((4,), 77.0), "x"), TypeError(f"{SPLIT_RULE}.*a tuple of 2: .*; a list's items")),
    ([1, 2], TypeError(f"{SPLIT_RULE}.*with a tensor to split into microbatches, got a list of 2")),
    ({}, TypeError(f"{SPLIT_RULE}.*with a tensor to split into microbatches, got an empty dict")),
    ({1: torch.full((4,), 77.0)}, TypeError("the keys of inputs must be names .* a list of 1: 1$")),
    (torch.ones(()), r"inputs must be of tensors whose first dimension is the batch, got .*\[\] "),
    ({"x": torch.ones(4), "y": [torch.tensor(77.0)]}, "of tensors whose first .* keys 'x', 'y'$"),
    (torch.ones(3), rf"inputs {ONE_NUMBER} \[3\]; use drop_last=True, or a smaller num_micro"),
    ([torch.ones(3), 1], rf"inputs {ONE_NUMBER} \[3\]; use drop_last=True"),
    ((torch.ones(4), torch.ones(5)), rf"inputs {ONE_NUMBER} \[4, 5\]$"),
    ({"x": torch.ones(4), "y": [torch.ones(5)]}, rf"inputs {ONE_NUMBER} \[4, 5\]$"),
    (
        {"mask": create_block_mask(lambda b, h, q, k: q >= k, 4, None, 128, 128, device="cpu"),
         "x": torch.ones(4)},
        "inputs must have block masks that all samples share, with B=None, .*, got one of 4",
    ),
]  # fmt: skip
BAD_TARGETS = [
    (None, "target must be given on the rank of the last stage, .*, got None$"),
    (7, TypeError("target must be a tensor, or a tuple, list or dict of tensors, got 7$")),
    ([], TypeError("target must be a tensor, or .*, got an empty list$")),
    ({"x": SAMPLES, "y": 1}, TypeError("target must be a tensor, or .* keys 'x', 'y'$")),
    (torch.ones(()), r"target must be of tensors whose first dimension is the batch, got .*\[\] "),
    (torch.ones(3), rf"target {ONE_NUMBER} \[3\]; use drop_last=True, or a smaller num_micro"),
    ({"x": torch.ones(4), "y": torch.ones(5)}, rf"target {ONE_NUMBER} \[4, 5\]$"),
]


def check(found, get, wanted):
    """Check the error that is found, and that getting a microbatch raises it."""
    is_type = isinstance(wanted, TypeError)
    assert isinstance(found, TypeError) == is_type
    assert re.search(str(wanted), str(found))
    assert "77" not in str(found), "no values of tensors"
    with pytest.raises(TypeError if is_type else ValueError, match=re.escape(str(found))):
        get(0)


def test_a_batch_that_cannot_be_split_is_refused(subtests):
    for inputs, wanted in BAD_INPUTS:
        with subtests.test(message=str(wanted)):
            splitter = MicrobatchSplitter(inputs, None, 0, 4)
            check(splitter.find_input_error(), splitter.inputs, wanted)
    for target, wanted in BAD_TARGETS:
        with subtests.test(message=str(wanted)):
            splitter = MicrobatchSplitter(torch.ones(4), target, 0, 4)
            check(splitter.find_target_error(), splitter.target, wanted)
            assert splitter.find_input_error() is None, "a target that may not be read"


def test_inputs_and_target_of_different_numbers_of_samples_are_refused():
    splitter = MicrobatchSplitter([torch.ones(8), None], {"y": torch.ones(6)}, 0, 4)
    message = "inputs and target must have the same number of samples, got 8 and 6: take both"
    check(splitter.find_input_error(), splitter.inputs, message)
    assert splitter.find_target_error() is None


def test_the_callers_microbatches_are_taken_as_they_are():
    parts = [(torch.ones(2, 3), "a"), (torch.ones(1, 5), "b")]
    args, kwargs = [(x,) for x, _ in parts], [{"name": name} for _, name in parts]
    targets = [torch.ones(2, requires_grad=True), torch.ones(1)]
    splitter = MicrobatchSplitter(*batch_of_call((), {}, None, args, kwargs, targets)[:2], 4, 2)
    assert splitter.find_input_error() is splitter.find_target_error() is None
    for microbatch, (x, name) in enumerate(parts, 4):
        (found,), named = call_module(Recorder(), splitter.inputs(microbatch))
        assert torch.equal(found, x)
        assert named == {"name": name}
    assert not splitter.target(4).requires_grad
    assert [splitter.share(4), splitter.share(5)] == [2 / 3, 1 / 3]


FORMS = [  # of a call, and the inputs, whether a target, and whether two positional arguments
    (((1, 2), {}, None), 1, True, True),
    (((1, None), {}, None), 1, False, False),
    (((1, 2), {}, 3), Arguments((1, 2)), True, False),
    (((1, 2), {"a": 3}, None), Arguments((1, 2), {"a": 3}), False, False),
    (((1,), {}, 3), 1, True, False),
    (((1, 2, 3), {}, None), Arguments((1, 2, 3)), False, False),
    (((), {"a": 3}, 4), Arguments((), {"a": 3}), True, False),
    (((), {}, 4), None, True, False),
    (((), {}, None), None, False, False),
]


def test_two_positional_arguments_alone_are_inputs_and_target(subtests):
    for call, inputs, has_target, is_short in FORMS:
        with subtests.test(str(call)):
            found, target, has_short_form = batch_of_call(*call, None, None, None)
            assert found == inputs
            assert (target is not None) == has_target
            assert has_short_form == is_short


def test_weights_of_losses_are_of_the_targets():
    targets = [torch.tensor([1, 0, 1]), torch.tensor([1, 1, 1, 1, 1])]
    for weigh in (torch.sum, lambda target: target.sum().item(), lambda target: target.sum() / 4):
        splitter = MicrobatchSplitter(None, PreSplit({"target_mbs": targets}), 2, 2, weigh)
        assert [splitter.share(2), splitter.share(3)] == [2 / 7, 5 / 7]


BAD_WEIGHTS = [
    (-1, "-1 for"), (float("nan"), "nan for"), (torch.tensor(float("inf")), "inf"),
    (torch.ones(2), r"a tensor of shape \[2\] and torch.float32 for"),
    ("text", "'text' for"), (None, "None for"),
    (torch.tensor(1j), r"a tensor of shape \[\] and torch.complex64 for"),
]  # fmt: skip


def test_bad_weights_are_refused_with_the_microbatch(subtests):
    for weight, what in BAD_WEIGHTS:
        with subtests.test(what):
            weights = iter([1.0, weight])
            splitter = MicrobatchSplitter(
                torch.ones(4), torch.ones(4), 6, 2, lambda target, rest=weights: next(rest)
            )
            error = splitter.find_target_error()
            assert re.match(f"loss_weight_fn must return a finite number, .*, got {what}", error)
            assert error.endswith("microbatch 7")
            assert splitter.find_input_error() is None, "the rank of the inputs computes no weights"


def test_first_dimensions_are_compared_but_where_they_may_be_of_anything():
    args, targets = [(torch.ones(2, 3),), (torch.ones(1, 2),)], [torch.ones(1), torch.ones(2)]
    counted = PreSplit({"arg_mbs": args}), PreSplit({"target_mbs": targets})
    message = "microbatch 0 of inputs and target must have the same number of samples, got 2 and 1"
    assert MicrobatchSplitter(*counted, 0, 2).find_input_error().startswith(message)
    assert MicrobatchSplitter(*counted, 0, 2, torch.sum).find_input_error() is None
    packed = PreSplit({"arg_mbs": [(torch.ones(1, 5), torch.tensor([0, 2, 5]))] * 2})
    assert MicrobatchSplitter(packed, counted[1], 0, 2).find_input_error() is None
    unknown = PreSplit({"target_mbs": [[torch.ones(1), torch.ones(2)]] * 2})
    assert re.match(
        r"target_mbs must have entries of tensors with one number of samples, .*\[0\]: give loss_",
        MicrobatchSplitter(packed, unknown, 0, 2).find_target_error(),
    )
    assert MicrobatchSplitter(packed, unknown, 0, 2, len).find_target_error() is None


class Hooked(Recorder):
    def __init__(self):
        super().__init__()
        self.register_forward_pre_hook(lambda module, args: (*args, 1))

    def forward(self, x, one):
        return x


def test_a_layer_whose_hooks_add_arguments_is_not_checked_by_its_signature():
    for layer, error in ((Hooked(), None), (nn.Identity(), "got 2 by position")):
        splitter = MicrobatchSplitter(Arguments((SAMPLES, 1)), None, 0, 2, None, layer)
        found = splitter.find_input_error()
        assert (found is None) == (error is None)
        assert error is None or error in found
