"""A backward in two halves, the gradients of the inputs first, with nothing computed twice."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .gradient_paths import GradientPaths, Part

Arrived = tuple[GradientEdge, Tensor]  # where in the graph, and what has come there


class WeightBackward:
    """The half of a backward that no other rank waits for: what ``backward_input`` has put off.

    Until it has run it holds the graph from the parameters' nodes down, and the gradients that
    arrived there: nobody may write to the output gradients or to the input gradients before.

    Args:
        later: parameters, and the edges from which their gradients are still to be computed.
        found: parameters and their gradients, None where none came.
    """

    def __init__(
        self,
        later: Sequence[tuple[list[Arrived], list[Tensor]]],
        found: Sequence[tuple[Tensor, Tensor | None]],
    ) -> None:
        self._later = list(reversed(later))
        self._found = list(reversed(found))
        self._done = False

    def run(self) -> None:
        """Add the parameters' gradients into ``parameter.grad``, and let go of the graph.

        Raises:
            RuntimeError: it has run before.
        """
        if self._done:
            raise RuntimeError("run must be called once after each backward_input, got a second")
        self._done = True
        while self._later:
            arrived, parameters = self._later.pop()
            if arrived:
                edges, gradients = zip(*arrived, strict=True)
                torch.autograd.backward(edges, gradients, inputs=parameters)
        while self._found:
            _accumulate(*self._found.pop())


def backward_input(
    outputs: Sequence[Tensor],
    output_gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None],
) -> tuple[tuple[Tensor | None, ...], WeightBackward]:
    """The gradients of the inputs now, those of the parameters when the second result is run.

    Together both halves compute what ``torch.autograd.backward`` does, each gradient once, and to
    the same bits (Qi et al., ICLR 2024, call them B and W). Three things make the first half
    compute some parameters' gradients too, which the second then only adds: layers in a row that
    share the parameters, functions written in Python (compiled stages), and kernels that make all
    gradients at once (batch norm, PReLU, RNNs; attention with a learned query, key or value).
    Hooks on an activation run in both halves, hooks after the accumulation of such a parameter
    not at all; activation checkpoints are recomputed for every layer of theirs that has parameters.

    The graph lives until the second half has run and ``outputs`` are gone: let go of them.

    Args:
        outputs: tensors of any shape; those that require no gradient are passed over.
        output_gradients: one for each output, of its shape and dtype. None where none has come,
            also for a loss: its gradient must be given.
        inputs: leaves of the graph. None, or requiring no gradient, where none is wanted; if that
            holds for all of them, the whole backward is left to the second half.

    Returns:
        For each input its gradient, or None where none is wanted or none arrives; and the rest.

    Raises:
        ValueError: not one gradient an output, or an input that was itself computed.
    """
    _check(outputs, output_gradients, inputs)
    arrived = [
        (get_gradient_edge(output), gradient)
        for output, gradient in zip(outputs, output_gradients, strict=True)
        if output.requires_grad and gradient is not None
    ]
    wanted = [x is not None and x.requires_grad for x in inputs]
    edges = [get_gradient_edge(x) for x in inputs if x is not None and x.requires_grad]
    paths = GradientPaths([edge for edge, _ in arrived], [edge.node for edge in edges])
    later, now = _divide(paths)
    joints = [joint for part in later for joint in part.joints]
    leaves = [GradientEdge(leaf, 0) for part in now for leaf in part.leaves]
    gradients = _gradients(arrived, [*edges, *joints, *leaves], retain_graph=bool(joints))
    input_gradients = tuple(next(gradients) if each else None for each in wanted)
    return input_gradients, WeightBackward(
        [_put_off(part, arrived, gradients) for part in later],
        list(zip((p for part in now for p in part.parameters), gradients, strict=True)),
    )


def _check(
    outputs: Sequence[Tensor],
    output_gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None],
) -> None:
    if len(outputs) != len(output_gradients):
        raise ValueError(
            f"output_gradients must hold one gradient or None for each output, got "
            f"{len(output_gradients)} for {len(outputs)} outputs"
        )
    for index, x in enumerate(inputs):
        if x is not None and not x.is_leaf:
            raise ValueError(
                f"inputs must be leaves of the graph, got inputs[{index}] computed by "
                f"{x.grad_fn}: detach() it before the forward"
            )


def _divide(paths: GradientPaths) -> tuple[list[Part], list[Part]]:
    """The parts that can wait, and those that cannot."""
    later: list[Part] = []
    now: list[Part] = []
    for part in paths.parts():
        (later if paths.can_wait(part) else now).append(part)
    return later, now


def _gradients(
    arrived: Sequence[Arrived], edges: Sequence[GradientEdge], retain_graph: bool
) -> Iterator[Tensor | None]:
    """What comes to each edge, None where nothing does."""
    if not (arrived and edges):
        return iter([None] * len(edges))
    roots, gradients = zip(*arrived, strict=True)
    return iter(
        torch.autograd.grad(roots, edges, gradients, retain_graph=retain_graph, allow_unused=True)
    )


def _put_off(
    part: Part, arrived: Sequence[Arrived], gradients: Iterator[Tensor | None]
) -> tuple[list[Arrived], list[Tensor]]:
    """Where the part's gradients have come to, and the parameters they still have to get to."""
    captured = [(joint, next(gradients)) for joint in part.joints]
    outputs = [arrived[index] for index in part.outputs]
    return [*outputs, *((edge, g) for edge, g in captured if g is not None)], part.parameters


def _accumulate(parameter: Tensor, gradient: Tensor | None) -> None:
    if gradient is None:
        return
    with torch.no_grad():
        if parameter.grad is None:
            parameter.grad = gradient.clone()  # it may be the caller's output gradient itself
        else:
            parameter.grad += gradient
