"""Profiling of layers: their times, without side effects."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from ...training import uncompiled
from ...training.arguments import require
from ..messages import Value, tensors_of
from ..messages.format import detached
from ..runtime.inputs import Arguments, Inputs, call_module, input_tensors
from ..runtime.preserve_state import preserving_state
from ..runtime.stage_layers import Skippable, check_stashed
from ..runtime.values import check_value


class LayerCost(NamedTuple):
    """The seconds of one layer on one microbatch; of both gradients together in a backward."""

    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        """Return the seconds of forward and backward."""
        return self.forward + self.backward


def profile_layers(
    layers: Sequence[nn.Module], example: Inputs, repeats: int = 5
) -> list[LayerCost]:
    """Profile each layer of a sequence, in its training mode, on a microbatch.

    Each runs alone, on the output of the previous one: once to warm up, then ``repeats`` times for
    the median. Gradients, buffers, training modes and torch's random number generators are
    restored; other changes by layers or hooks are not undone. A layer that failed is a
    RuntimeError.
    """
    for index, layer in enumerate(layers):
        lazy = any(is_lazy(tensor) for tensor in (*layer.parameters(), *layer.buffers()))
        got = f"a lazy layers[{index}]: run the model once before training"
        require(not lazy, "layers must have initialized parameters", got)
    costs: list[LayerCost] = []
    profiler = _LayerProfiler(example)
    with preserving_state(layers, input_tensors(example)), torch.enable_grad():
        for index, layer in enumerate(layers):
            try:
                costs.append(profiler.profile(layer, repeats))
            except Exception as error:
                problem = f"{type(error).__name__}: {error}".partition("\n")[0]
                raise RuntimeError(
                    f"layers[{index}] failed while it was profiled: {problem}; give split=[...] to "
                    "skip the measurement"
                ) from error
    return costs


class _LayerProfiler:
    def __init__(self, value: Inputs) -> None:
        self._value = value
        self._stashed: dict[str, Tensor] = {}

    def profile(self, layer: nn.Module, repeats: int) -> LayerCost:
        """Profile a layer, and keep its output for the next one."""
        inner = uncompiled(layer)
        if isinstance(inner, Skippable) and inner.pop:
            popped = tuple(self._stashed[name] for name in inner.pop)
            self._value = Arguments((self._value, *popped))
        own = (*layer.parameters(), *layer.buffers(), *input_tensors(self._value))
        devices = {tensor.device for tensor in own}
        costs = []
        for _ in range(1 + repeats):
            output, cost = _run(layer, self._value, devices)
            costs.append(cost)
        self._value = detached(output)
        if isinstance(inner, Skippable) and inner.stash is not None:
            self._stashed[inner.stash] = check_stashed(inner.stash, self._value)
        forward, backward = zip(*costs[1:], strict=True)
        return LayerCost(median(forward), median(backward))


def _run(
    layer: nn.Module, value: Inputs, devices: Iterable[torch.device]
) -> tuple[Value, LayerCost]:
    """Run a layer forward and backward, on copies of its inputs, which it may write to."""
    value = tree_map_only(Tensor, _copy, value)
    sources = (*input_tensors(value), *layer.parameters())
    targets = [get_gradient_edge(tensor) for tensor in sources if tensor.requires_grad]
    output, forward = _timed(lambda: check_value(call_module(layer, value)), devices)
    outputs = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    gradients = [torch.ones_like(tensor) for tensor in outputs]
    backward = partial(torch.autograd.grad, outputs, targets, gradients, allow_unused=True)
    seconds = _timed(backward, devices)[1] if outputs and targets else 0.0
    return output, LayerCost(forward, seconds)


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy that is not a leaf, as the output of a layer is not one either."""
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()


def _timed(function: Callable[[], Any], devices: Iterable[torch.device]) -> tuple[Any, float]:
    """Return the result of a call, and its seconds on all devices."""
    _synchronize(devices)
    begin = time.perf_counter()
    result = function()
    _synchronize(devices)
    return result, time.perf_counter() - begin


def _synchronize(devices: Iterable[torch.device]) -> None:
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
