"""Splitting a batch into microbatches, and checking it before any of them enters the pipeline."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ...comm import Value, summarize, wrong_type


@dataclass(frozen=True)
class Arguments:
    """The arguments of the model's first layer for one microbatch, as torch's schedules give them.

    Args:
        args: the positional ones; a batch that is a list.
        kwargs: the keyword arguments; a batch that is a dict.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


Inputs = Value | Arguments  # Value: one argument, as each layer gets from the previous one


def call_module(module: nn.Module, inputs: Inputs) -> Any:
    """Return the output of a stage's module, or of the model's first layer, for its inputs."""
    if isinstance(inputs, Arguments):
        return module(*inputs.args, **inputs.kwargs)
    return module(inputs)


def input_tensors(inputs: Inputs) -> tuple[Tensor, ...]:
    """Return the tensors of a layer's inputs, also those nested in its arguments."""
    nested = (inputs.args, inputs.kwargs) if isinstance(inputs, Arguments) else inputs
    return tuple(each for each in tree_leaves(nested) if isinstance(each, Tensor))


def map_tensors(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Return a layer's inputs with each tensor replaced by ``function(tensor)``."""
    if isinstance(inputs, Arguments):
        mapped = tree_map_only(Tensor, function, (inputs.args, inputs.kwargs))
        return Arguments(*mapped)
    return function(inputs) if isinstance(inputs, Tensor) else tuple(map(function, inputs))


class MicrobatchSplitter:
    """One step's batch, split along the first dimension as ``torch.tensor_split`` does.

    Inputs that are a list are the positional arguments of the first layer, and those that are a
    dict its keyword arguments, as in ``step`` of the schedules of ``torch.distributed.pipelining``:
    every tensor in them is split, and every other value is given to each microbatch. A tuple of
    tensors is one argument.

    Args:
        inputs: a tensor, a tuple of tensors, or a list or dict; None on ranks without the first
            stage.
        target: a tensor, or a tuple, list or dict of tensors, for the last stage, or stages with
            heads; None on other ranks.
        first: the number of the step's first microbatch.
        num_microbatches: how many parts.
    """

    place = ""  # rank and step, for errors

    def __init__(self, inputs: Any, target: Any, first: int, num_microbatches: int) -> None:
        self._inputs = _as_dict(inputs)
        self._target = _as_dict(target)
        self._first = first
        self._num_microbatches = num_microbatches

    def find_input_error(self) -> str | TypeError | None:
        """Return why the inputs cannot be split, or None; for the rank of the first stage.

        If the target is given too, and can be split, it must have as many samples.
        """
        error = self._input_type_error() or self._size_error("inputs", self._inputs)
        if error or self._target is None or self.find_target_error():
            return error
        num_inputs, num_targets = _num_samples(self._inputs), _num_samples(self._target)
        if num_inputs == num_targets:
            return None
        return (
            f"inputs and target must have the same number of samples, got {num_inputs} and "
            f"{num_targets}: take both from one batch"
        )

    def find_target_error(self) -> str | TypeError | None:
        """Return why the target cannot be split, or None; for ranks that compute a loss."""
        return self._target_error

    @cached_property
    def _target_error(self) -> str | TypeError | None:
        target = self._target
        if target is None:
            return _missing("target", "the rank of the last stage, with Interlocking on every rank")
        leaves = tree_leaves(target)
        if not leaves or not all(isinstance(each, Tensor) for each in leaves):
            return wrong_type("target", "a tensor, or a tuple, list or dict of tensors", target)
        return self._size_error("target", target)

    def inputs(self, microbatch: int) -> Any:
        """Return the inputs of a microbatch: a ``Value``, or ``Arguments``.

        Raises:
            ValueError: the batch is missing, or cannot be split into the microbatches.
            TypeError: it is of a wrong type.
        """
        return self._split_inputs[microbatch - self._first]

    def target(self, microbatch: int) -> Any:
        """Return the target of a microbatch, in the structure of the batch's; raises as above."""
        return self._split_target[microbatch - self._first]

    def share(self, microbatch: int) -> float:
        """Return a microbatch's fraction of the step's samples, which the target counts."""
        samples = _num_samples(self._target)
        least, rest = divmod(samples, self._num_microbatches)
        return (least + (microbatch - self._first < rest)) / samples

    @cached_property
    def _split_inputs(self) -> list[Inputs]:
        _raise(self.find_input_error())
        parts = self._split(self._inputs)
        if isinstance(self._inputs, list):
            return [Arguments(args=tuple(part)) for part in parts]
        if isinstance(self._inputs, dict):
            return [Arguments(kwargs=part) for part in parts]
        return parts

    @cached_property
    def _split_target(self) -> list[Any]:
        _raise(self.find_target_error())
        return self._split(self._target)

    def _split(self, value: Any) -> list[Any]:
        leaves, structure = tree_flatten(value)
        # Detached: each microbatch's backward would go through a graph that the user made before.
        parts = [
            torch.tensor_split(leaf.detach(), self._num_microbatches)
            if isinstance(leaf, Tensor)
            else [leaf] * self._num_microbatches
            for leaf in leaves
        ]
        return [tree_unflatten(part, structure) for part in zip(*parts, strict=True)]

    def _input_type_error(self) -> str | TypeError | None:
        inputs = self._inputs
        if inputs is None:
            return _missing("inputs", "the rank of the first stage")
        rule = "a tensor, a tuple of tensors, a list of arguments or a dict of keyword arguments"
        if not isinstance(inputs, Tensor | tuple | list | dict):
            return wrong_type("inputs", rule, inputs)
        if isinstance(inputs, tuple) and not (
            inputs and all(isinstance(each, Tensor) for each in inputs)
        ):
            fix = "a list's items are the arguments of the first layer, of any type"
            return wrong_type("inputs", rule, inputs, fix)
        leaves = tree_leaves(inputs)
        if not any(isinstance(each, Tensor) for each in leaves):
            return wrong_type("inputs", f"{rule}, with a tensor to split into microbatches", inputs)
        if isinstance(inputs, dict) and not all(isinstance(key, str) for key in inputs):
            rule = "names of the first layer's arguments"
            return wrong_type("the keys of inputs", rule, list(inputs))
        return _mask_error(leaves)

    def _size_error(self, name: str, value: Any) -> str | None:
        tensors = [each for each in tree_leaves(value) if isinstance(each, Tensor)]
        if not all(each.dim() for each in tensors):
            return (
                f"{name} must be of tensors whose first dimension is the batch, got one of shape "
                f"[] in {summarize(value)}"
            )
        sizes = sorted({len(each) for each in tensors})
        if len(sizes) == 1 and sizes[0] >= self._num_microbatches:
            return None
        fix = "" if len(sizes) > 1 else "; use drop_last=True, or fewer microbatches"
        return (
            f"{name} must have one number of samples, at least one for each of the "
            f"{self._num_microbatches} microbatches, got {sizes}{fix}"
        )


def _as_dict(value: Any) -> Any:
    """Return a mapping that is no dict, such as a tokenizer's, as one."""
    return dict(value) if isinstance(value, Mapping) and not isinstance(value, dict) else value


def _mask_error(leaves: list[Any]) -> str | None:
    """Return why FlexAttention's masks among the inputs cannot be given to each microbatch."""
    # Torch's schedules split a mask of several samples, together with its function.
    flex_attention = sys.modules.get("torch.nn.attention.flex_attention")
    mask = getattr(flex_attention, "BlockMask", ())
    sizes = {len(each.kv_num_blocks) for each in leaves if isinstance(each, mask)} - {1}
    if not sizes:
        return None
    return (
        "inputs must have block masks that all samples share, with B=None, as each microbatch gets "
        f"the whole mask, got one of {min(sizes)} samples: create it in the layer instead"
    )


def _missing(name: str, where: str) -> str:
    return f"{name} must be given on {where}, got None"


def _num_samples(value: Any) -> int:
    return next(len(each) for each in tree_leaves(value) if isinstance(each, Tensor))


def _raise(error: str | TypeError | None) -> None:
    if error is not None:
        raise error if isinstance(error, TypeError) else ValueError(error)
