"""What each layer costs: seconds of its passes, bytes of what it holds. Nothing is left changed."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy

from ...comm import Value, tensors_of
from ..runtime.stage import check_value
from ..runtime.unchanged import unchanged
from .saved_bytes import SavedBytes, storages


@dataclass(frozen=True)
class LayerCost:
    """Of one layer and one microbatch.

    Args:
        forward: seconds.
        backward: seconds, the gradients of inputs and parameters together.
        parameter_bytes: of its parameters, frozen ones included.
        activation_bytes: what autograd keeps from the forward to the backward, less parameters,
            buffers, and what the layers before keep already.
        output_bytes: what it hands on.
    """

    forward: float
    backward: float
    parameter_bytes: int
    activation_bytes: int
    output_bytes: int

    @property
    def seconds(self) -> float:
        """Both passes."""
        return self.forward + self.backward


def profile_layers(
    layers: Sequence[nn.Module], example: Value, repeats: int = 5
) -> list[LayerCost]:
    """The cost of each layer in a row of them.

    Each runs alone, on what the one before has made of the example: once to warm up, then
    ``repeats`` times for the median. So no more than one layer's activations are held. Gradients,
    buffers, training modes and torch's random number generators are as before when this returns or
    raises; what layers or hooks change besides is not undone.

    Args:
        layers: each takes the output of the one before as its only argument. They are measured in
            the mode that they are in.
        example: a microbatch, where the first layer wants it.
        repeats: how often each layer is timed.

    Raises:
        RuntimeError: a layer failed, or returned neither a tensor nor a tuple of tensors; the
            sentence names it.
        ValueError: a layer has parameters that have no shape yet.
    """
    _check_shapes(layers)
    costs: list[LayerCost] = []
    profiler = _LayerProfiler(example)
    with unchanged(layers, tensors_of(example)), torch.enable_grad():
        for index, layer in enumerate(layers):
            try:
                costs.append(profiler.profile(layer, repeats))
            except Exception as error:
                raise RuntimeError(
                    f"layers[{index}] failed while it was measured: {type(error).__name__}: {error}"
                ) from error
    return costs


def _check_shapes(layers: Sequence[nn.Module]) -> None:
    for index, layer in enumerate(layers):
        if any(is_lazy(tensor) for tensor in (*layer.parameters(), *layer.buffers())):
            raise ValueError(
                f"layers must have parameters with shapes, got a lazy layers[{index}]: run the "
                "model once before it is trained"
            )


class _LayerProfiler:
    """A microbatch on its way through the layers."""

    def __init__(self, value: Value) -> None:
        self._value = value
        self._kept = [False] * len(tensors_of(value))  # which of its tensors layers so far keep

    def profile(self, layer: nn.Module, repeats: int) -> LayerCost:
        """Measure a layer, and go on to its output."""
        own = [*layer.parameters(), *layer.buffers()]
        devices = {tensor.device for tensor in (*own, *tensors_of(self._value))}
        times = [_time(_LayerRun(layer, self._value), devices) for _ in range(1 + repeats)][1:]
        run = _LayerRun(layer, self._value)
        with (saved := SavedBytes()):
            run.forward()
        held = saved.held()
        before = storages(x for x, kept in zip(run.inputs, self._kept, strict=True) if kept)
        new = held.keys() - storages(own).keys() - before.keys()
        outputs = tensors_of(run.output)
        self._kept = [not (held.keys() | before.keys()).isdisjoint(storages([y])) for y in outputs]
        self._value = _detached(run.output)
        return LayerCost(
            forward=median(forward for forward, _ in times),
            backward=median(backward for _, backward in times),
            parameter_bytes=_num_bytes(layer.parameters()),
            activation_bytes=sum(held[address] for address in new),
            output_bytes=_num_bytes(outputs),
        )


class _LayerRun:
    """One forward and backward of a layer, on copies of its inputs: it may write to them."""

    def __init__(self, layer: nn.Module, value: Value) -> None:
        self._layer = layer
        self.inputs = tuple(_copy(tensor) for tensor in tensors_of(value))
        self._argument = self.inputs[0] if isinstance(value, Tensor) else self.inputs
        self._targets = [
            get_gradient_edge(tensor)
            for tensor in (*self.inputs, *layer.parameters())
            if tensor.requires_grad
        ]

    def forward(self) -> None:
        """Sets ``output``."""
        self.output = check_value(self._layer(self._argument))

    def make_output_grads(self) -> None:
        """Make the gradients that ``backward`` begins with: not the layer's work."""
        self._roots = [y for y in tensors_of(self.output) if y.requires_grad]
        self._output_grads = [torch.ones_like(y) for y in self._roots]

    def backward(self) -> None:
        """The gradients are dropped."""
        if self._roots and self._targets:
            torch.autograd.grad(self._roots, self._targets, self._output_grads, allow_unused=True)


def _copy(tensor: Tensor) -> Tensor:
    """No leaf, as what the layer before returns is none either."""
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()


def _detached(value: Value) -> Value:
    """The value without its graph, requiring gradients where it did."""
    tensors = tuple(x.detach().requires_grad_(x.requires_grad) for x in tensors_of(value))
    return tensors[0] if isinstance(value, Tensor) else tensors


def _time(run: _LayerRun, devices: Iterable[torch.device]) -> tuple[float, float]:
    """Seconds of both passes."""
    forward = _seconds(run.forward, devices)
    run.make_output_grads()
    return forward, _seconds(run.backward, devices)


def _seconds(function: Callable[[], None], devices: Iterable[torch.device]) -> float:
    _synchronize(devices)
    begin = time.perf_counter()
    function()
    _synchronize(devices)
    return time.perf_counter() - begin


def _synchronize(devices: Iterable[torch.device]) -> None:
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
