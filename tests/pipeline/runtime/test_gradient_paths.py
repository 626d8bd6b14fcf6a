"""Where parameters join the paths from outputs to inputs, and which can be deferred."""

import torch
from torch.autograd.graph import get_gradient_edge

from pyparallel.pipeline.runtime.gradient_paths import GradientPaths


def analyze(function):
    """Return each part of a graph of x, w, b: parameters, joints, outputs, can_defer."""
    x, w, b = (torch.ones(4, 4, requires_grad=True) for _ in range(3))
    result = function(x, w, b)
    outputs = result if isinstance(result, tuple) else (result,)
    roots = [get_gradient_edge(output) for output in outputs]
    paths = GradientPaths(roots, [get_gradient_edge(x).node])
    names = {id(w): "w", id(b): "b"}
    return [
        (
            "".join(sorted(names[id(parameter)] for parameter in part.parameters)),
            sorted(
                f"{edge.node.name().split('Backward')[0]}{edge.output_nr}" for edge in part.joints
            ),
            sorted(part.outputs),
            paths.can_defer(part),
        )
        for part in paths.parts()
    ]


CASES = {
    "one after the other": (
        lambda x, w, b: (x @ w) * b,
        [("b", ["Mul0"], [], True), ("w", ["Mm0"], [], True)],
    ),
    "together": (
        lambda x, w, b: torch.addmm(b, x, w.t().relu()).relu(),
        [("bw", ["Addmm0"], [], True)],
    ),
    "through a function of parameters": (lambda x, w, b: x @ (w @ b), [("bw", ["Mm0"], [], True)]),
    "joined by a product": (
        lambda x, w, b: torch.cat([x @ w, x @ (w @ b)]),
        [("bw", ["Mm0", "Mm0"], [], True)],
    ),
    "in a row": (lambda x, w, b: (x @ w).relu() @ w, [("w", ["Mm0", "Mm0"], [], False)]),
    "of an indivisible kernel": (
        lambda x, w, b: torch.prelu(x, w[0]) * b,
        [("b", ["Mul0"], [], True), ("w", ["PreluKernel0"], [], False)],
    ),
    "in no graph": (lambda x, w, b: x.relu(), []),
    "off the path": (lambda x, w, b: x.detach() @ w, [("w", [], [0], True)]),
}


def test_every_parameter_is_in_one_part(subtests):
    for case, (function, expected) in CASES.items():
        with subtests.test(case=case):
            assert analyze(function) == expected


def test_outputs_on_no_path_belong_to_the_part_of_their_parameters():
    found = analyze(lambda x, w, b: (w.relu(), x @ w, b, b * 2))
    assert found == [("w", ["Mm0"], [0], True), ("b", [], [2, 3], True)]


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x + w, x - w, x * w

    @staticmethod
    def backward(ctx, *gradients):
        raise AssertionError("the backward must not run")


def test_a_joint_receives_gradients_through_its_used_outputs_only():
    def use_two(x, w, b):
        first, _, third = Triple.apply(x, w)
        return first + third

    assert analyze(use_two) == [("w", ["Triple0", "Triple2"], [], False)]
