"""The contract of every head builder, and the list with one for each stage but the last."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from pyparallel.pipeline.interlocking.heads import (
    ConvHead,
    GivenHead,
    Head,
    LinearHead,
    PooledHead,
    TiedHead,
    as_heads,
)
from pyparallel.training.arguments import find_error

EMBEDDING = nn.Embedding(7, 6)

# A builder, the shape of its stage's outputs, and that of the head's.
EVERY_HEAD = [
    (LinearHead(5), (3, 6), (3, 5)),
    (LinearHead(5, nn.LayerNorm), (3, 4, 6), (3, 4, 5)),
    (PooledHead(5), (3, 6), (3, 5)),
    (PooledHead(5), (3, 6, 4, 2), (3, 5)),
    (PooledHead(5, dim=1), (3, 6, 4), (3, 5)),
    (PooledHead(5, dim=-1), (3, 4, 6), (3, 5)),
    (ConvHead(5, (8, 4)), (3, 6, 4, 4), (3, 5)),
    (TiedHead(EMBEDDING), (3, 4, 6), (3, 4, 7)),
    (TiedHead(EMBEDDING, None), (3, 6), (3, 7)),
    (GivenHead(nn.Linear(6, 5)), (3, 4, 6), (3, 4, 5)),
]
BUILT = [row for row in EVERY_HEAD if not isinstance(row[0], GivenHead)]


def call(head: Head, module: nn.Module, value: Tensor) -> Tensor:
    return module(value) if head.shared is None else module(value, head.shared.to(value.dtype))


def test_outputs_and_gradients(subtests):
    for head, shape, outputs in EVERY_HEAD:
        with subtests.test(head=head, shape=shape):
            value = torch.randn(shape, requires_grad=True)
            module = head.build(value)
            output = call(head, module, value)
            assert output.shape == outputs
            output.square().sum().backward()
            for each in (value, *module.parameters()):
                assert each.grad.abs().sum() > 0


def test_of_a_tuple_a_head_takes_the_first_tensor(subtests):
    for head, shape, _ in BUILT:
        with subtests.test(head=head, shape=shape):
            value, mask = torch.randn(shape), torch.ones(3, 4, dtype=torch.bool)
            torch.manual_seed(1)
            alone = call(head, head.build(value), value)
            torch.manual_seed(1)
            module = head.build((value, mask))
            weight = () if head.shared is None else (head.shared,)
            assert torch.equal(module((value, mask), *weight), alone)


def test_a_head_has_the_dtype_and_the_device_of_its_stages_output(subtests):
    for head, shape, outputs in BUILT:
        for kind in ({"dtype": torch.float64}, {"dtype": torch.bfloat16}, {"device": "meta"}):
            with subtests.test(head=head, shape=shape, kind=kind):
                value = torch.empty(shape, **kind).zero_()
                module = head.build(value)
                weight = () if head.shared is None else (head.shared.to(value),)
                output = module(value, *weight)
                assert output.shape == outputs
                for each in (output, *module.parameters()):
                    assert (each.dtype, each.device) == (value.dtype, value.device)


def test_heads_are_new_and_drawn_from_the_global_generator(subtests):
    for head, shape in [row[:2] for row in BUILT]:
        with subtests.test(head=head):
            built = []
            for seed in (1, 1, 2):
                torch.manual_seed(seed)
                built.append(head.build(torch.randn(shape)))
            assert len({id(each) for each in built}) == 3
            same, again, other = (list(each.parameters()) for each in built)
            assert all(map(torch.equal, same, again))
            drawn = [not torch.equal(a, b) for a, b in zip(same, other, strict=True)]
            assert any(drawn) or isinstance(head, TiedHead)  # its norm begins with ones


def test_the_repr_of_a_head_is_the_same_on_every_rank(subtests):
    for head in [row[0] for row in BUILT]:
        with subtests.test(head=head):
            assert repr(copy.deepcopy(head)) == repr(head)
            assert "\n" not in repr(head)
            assert " at 0x" not in repr(head)
            assert "tensor" not in repr(head)


UNFIT_EXAMPLES = [
    (torch.randn(6), r"a tensor of shape \[6\] and torch.float32"),
    (
        torch.ones(3, 6, 4, 6, dtype=torch.int64),
        r"a tensor of shape \[3, 6, 4, 6\] and torch.int64",
    ),
    ((torch.randn(6), torch.ones(3, 6)), r"a tensor of shape \[6\] and torch.float32"),
]


def test_an_example_that_does_not_fit_is_refused(subtests):
    for head in [row[0] for row in BUILT]:
        for example, got in UNFIT_EXAMPLES:
            with (
                subtests.test(head=head, got=got),
                pytest.raises(ValueError, match=rf"^heads must fit .*, got {got}; .*an nn.Module$"),
            ):
                head.build(example)


def test_a_given_module_is_returned_unchanged():
    module = nn.Linear(2, 2)
    assert GivenHead(module).build((torch.randn(2), torch.randn(2))) is module


def test_as_heads():
    linear, module = LinearHead(2), nn.Linear(2, 2)
    assert as_heads(linear, 4) == (linear, linear, linear)
    assert as_heads([linear, module], 3) == (linear, GivenHead(module))
    assert as_heads(nn.ModuleList([module, nn.Linear(2, 2)]), 3)[0] == GivenHead(module)
    sequential = nn.Sequential(module)
    assert as_heads(sequential, 2) == (GivenHead(sequential),)
    assert as_heads(linear, 1) == as_heads((), 1) == ()
    with pytest.raises(ValueError, match=r"^heads must hold one head for stage 0, got 0"):
        as_heads([], 2)


HEAD, NORM = nn.Linear(2, 2), nn.LayerNorm(2)


BAD_HEADS = [
    ([LinearHead(2)] * 2, 4, "for each of stages 0 to 2, got 2: stage 2 has none"),
    ([], 3, "for each of stages 0 to 1, got 0: stage 0 has none"),
    (nn.Linear(2, 2), 3, "for each of stages 0 to 1, got 1: stage 1 has none"),
    ([LinearHead(2)] * 3, 3, "to 1, got 3: stage 2 is the last, which has the loss itself"),
    ([LinearHead(2)] * 2, 2, "for stage 0, got 2: stage 1 is the last"),
    ([LinearHead(2)], 1, "none for a single one, got 1: stage 0 is the only one"),
    ([LinearHead(2), None], 3, "such as LinearHead(10) and modules, got None for stage 1"),
    ([LinearHead], 2, "got the class LinearHead for stage 0"),
    ([nn.functional.relu], 2, "got the function relu for stage 0"),
    (None, 3, "a list of one for each of stages 0 to 1, got None"),
    ("linear", 3, "got 'linear'"),
    ([HEAD, LinearHead(2), HEAD], 4, "share a module, as each learns from its own loss, got "),
    ([HEAD, HEAD], 3, "the same one for stages 0 and 1: give a builder, or copy.deepcopy it"),
    (
        [nn.Sequential(NORM, nn.Linear(2, 2)), nn.Sequential(NORM, nn.Linear(2, 2))],
        3,
        "share a parameter, as each learns from its own loss",
    ),
]


def test_as_heads_names_the_problem(subtests):
    for heads, num_stages, problem in BAD_HEADS:
        with subtests.test(problem=problem):
            message = find_error(partial(as_heads, heads, num_stages))
            assert message is not None
            assert message.startswith("heads must ")
            assert problem in message


GOOD_HEADS = [
    (LinearHead(2), 1),
    (LinearHead(2), 5),
    ([], 1),
    ((nn.Identity(), nn.Identity()), 3),
    ([HEAD, copy.deepcopy(HEAD), ConvHead(2)], 4),
]


def test_as_heads_accepts_valid_heads(subtests):
    for heads, num_stages in GOOD_HEADS:
        with subtests.test(heads=heads, num_stages=num_stages):
            assert find_error(partial(as_heads, heads, num_stages)) is None
