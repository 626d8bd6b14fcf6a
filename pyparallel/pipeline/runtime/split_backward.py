"""A backward in two halves, input gradients then weight gradients, with no node run twice."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .gradient_paths import GradientPaths, Part

EdgeGradient = tuple[GradientEdge, Tensor]  # an edge of the graph, and the gradient at it


class WeightBackward:
    """The half of a backward that ``backward_input`` deferred; no other rank waits for it.

    Until ``run`` it holds a part of the graph and the gradients at its edges: neither the output
    gradients nor the input gradients may be written to before. ``deferred`` are such edges with the
    parameters to compute from them, ``computed`` parameters with their gradients.
    """

    def __init__(
        self,
        deferred: Sequence[tuple[list[EdgeGradient], list[Tensor]]],
        computed: Sequence[tuple[Tensor, Tensor | None]],
    ) -> None:
        self._deferred = list(reversed(deferred))
        self._computed = list(reversed(computed))
        self._done = False

    def run(self) -> None:
        """Accumulate into ``parameter.grad``, and release the graph; once, else a RuntimeError."""
        if self._done:
            raise RuntimeError("run must be called once after each backward_input, got a second")
        self._done = True
        while self._deferred:
            edge_gradients, parameters = self._deferred.pop()
            if edge_gradients:
                edges, gradients = zip(*edge_gradients, strict=True)
                torch.autograd.backward(edges, gradients, inputs=parameters)
        while self._computed:
            _accumulate(*self._computed.pop())


def backward_input(
    outputs: Sequence[Tensor],
    output_gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None],
) -> tuple[tuple[Tensor | None, ...], WeightBackward]:
    """Compute the gradients of the inputs now, and defer those of the parameters.

    Both halves together compute what ``torch.autograd.backward`` does, each gradient once and
    bitwise equal (Qi et al., ICLR 2024, call them B and W). Some parameters' gradients are computed
    in the first half and only accumulated in the second. They are those of consecutive layers that
    share parameters, of custom Python functions (compiled stages), and of kernels that compute all
    gradients at once (batch norm, PReLU, RNNs; attention with a learned query, key or value).
    Hooks on an activation run in both halves, post-accumulate hooks of such a parameter in neither.

    Each output has a gradient, or None; ``inputs`` are leaves, or None to skip one: if all are
    skipped, the whole backward is deferred. Return the gradient of each input, None where skipped
    or unreached, and the deferred half, until which the graph lives.
    """
    edge_gradients = [
        (get_gradient_edge(output), gradient)
        for output, gradient in zip(outputs, output_gradients, strict=True)
        if output.requires_grad and gradient is not None
    ]
    wanted = [x is not None and x.requires_grad for x in inputs]
    edges = [get_gradient_edge(x) for x in inputs if x is not None and x.requires_grad]
    paths = GradientPaths([edge for edge, _ in edge_gradients], [edge.node for edge in edges])
    deferred: list[Part] = []
    immediate: list[Part] = []
    for part in paths.parts():
        (deferred if paths.can_defer(part) else immediate).append(part)
    joints = [joint for part in deferred for joint in part.joints]
    leaves = [GradientEdge(leaf, 0) for part in immediate for leaf in part.leaves]
    gradients = _gradients(edge_gradients, [*edges, *joints, *leaves], retain_graph=bool(joints))
    input_gradients = tuple(next(gradients) if each else None for each in wanted)
    return input_gradients, WeightBackward(
        [_defer(part, edge_gradients, gradients) for part in deferred],
        list(zip((p for part in immediate for p in part.parameters), gradients, strict=True)),
    )


def _gradients(
    edge_gradients: Sequence[EdgeGradient], edges: Sequence[GradientEdge], retain_graph: bool
) -> Iterator[Tensor | None]:
    if not (edge_gradients and edges):
        return iter([None] * len(edges))
    roots, gradients = zip(*edge_gradients, strict=True)
    return iter(
        torch.autograd.grad(roots, edges, gradients, retain_graph=retain_graph, allow_unused=True)
    )


def _defer(
    part: Part, edge_gradients: Sequence[EdgeGradient], gradients: Iterator[Tensor | None]
) -> tuple[list[EdgeGradient], list[Tensor]]:
    captured = [(joint, next(gradients)) for joint in part.joints]
    outputs = [edge_gradients[index] for index in part.outputs]
    return [*outputs, *((edge, g) for edge, g in captured if g is not None)], part.parameters


def _accumulate(parameter: Tensor, gradient: Tensor | None) -> None:
    if gradient is None:
        return
    with torch.no_grad():
        if parameter.grad is None:
            parameter.grad = gradient.clone()  # it may be the caller's output gradient itself
        else:
            parameter.grad += gradient
