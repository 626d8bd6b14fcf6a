"""The inputs of a step: the arguments of the model's first layer, and why they cannot be used."""

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_leaves

from ...training import summarize, wrong_type
from ..messages import Value
from ..messages.format import Refusal
from ..messages.refusals import StepRefusedError

_ENTRIES: dict[str, tuple[type, str]] = {  # of the lists of microbatches
    "arg_mbs": (tuple, "a tuple of arguments, such as (x,)"),
    "kwarg_mbs": (dict, "a dict of keyword arguments"),
    "target_mbs": (object, ""),
}


@dataclass(frozen=True)
class Arguments:
    """The arguments of the model's first layer for a batch or one microbatch of it."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


# Its tensors are found, mapped and split as those of a tuple.
register_pytree_node(
    Arguments, lambda each: ([each.args, each.kwargs], None), lambda parts, _: Arguments(*parts)
)
Inputs = Value | Arguments  # Value: one argument, as each layer gets from the previous one


def call_module(
    module: nn.Module, inputs: Inputs, refuse: Callable[[Exception], Refusal] | None = None
) -> Any:
    """Return the output of a stage's module, or of the model's first layer, for its inputs.

    With ``refuse`` an error is a StepRefusedError, for what it returns.
    """
    try:
        if isinstance(inputs, Arguments):
            return module(*inputs.args, **inputs.kwargs)
        return module(inputs)
    except Exception as error:
        if refuse is not None:
            raise StepRefusedError(refuse(error), 0) from error
        is_tuple = type(inputs) is tuple
        if not (is_tuple and isinstance(error, AttributeError) and type(error.obj) is tuple):
            raise
        rule = "the first layer of a stage must take a tuple by its positions"
        fix = "unpack it as hidden, mask = value, or move the split"
        raise TypeError(
            f"{rule}, as a NamedTuple is sent as its tensors alone, got one that reads "
            f".{error.name}: {fix}"
        ) from error


def input_tensors(inputs: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a layer's inputs, also those nested in its arguments."""
    return tuple(each for each in tree_leaves(inputs) if isinstance(each, Tensor))


@dataclass(frozen=True)
class PreSplit:
    """Microbatches that the caller has split, as the schedules of torch 2.14 take them."""

    # With an entry for each microbatch, by name: arg_mbs and kwarg_mbs, or target_mbs.
    lists: dict[str, Any]
    is_mixed: bool = False  # a whole batch is given too

    @property
    def names(self) -> str:
        """Return the names of the lists, for errors."""
        return " and ".join(self.lists)

    def find_error(self, num_microbatches: int) -> str | TypeError | None:
        """Return why these are not the microbatches of a step, or None."""
        if self.is_mixed:
            return (
                "arg_mbs, kwarg_mbs and target_mbs must be given without a whole batch, got both "
                "in one call: leave the other arguments out"
            )
        for name, entries in self.lists.items():
            if not isinstance(entries, list):
                return wrong_type(name, "a list with an entry for each microbatch", entries)
            if len(entries) != num_microbatches:
                return (
                    f"{name} must be a list with an entry for each of the {num_microbatches} "
                    f"microbatches, got {len(entries)}"
                )
            kind, rule = _ENTRIES[name]
            for index, entry in enumerate(entries):
                if not isinstance(entry, kind):
                    return wrong_type(f"{name}[{index}]", rule, entry)
        return None

    def arguments(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Yield the positional and keyword arguments of each microbatch."""
        args, kwargs = self.lists.get("arg_mbs"), self.lists.get("kwarg_mbs")
        num_microbatches = len(args if args is not None else kwargs or ())
        no_args, no_kwargs = [()] * num_microbatches, [{}] * num_microbatches  # type: ignore[var-annotated]
        yield from zip(args or no_args, kwargs or no_kwargs, strict=True)


def batch_of_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    arg_mbs: Any,
    kwarg_mbs: Any,
    target_mbs: Any,
) -> tuple[Any, Any, bool]:
    """Return the inputs and the target of a call, and whether they are its positional arguments."""
    if (arg_mbs, kwarg_mbs, target_mbs) == (None, None, None):
        if len(args) == 2 and not kwargs and target is None:
            return *args, args[1] is not None
        return inputs_of_call(args, kwargs), target, False
    is_mixed = bool(args or kwargs) or target is not None
    targets = PreSplit({"target_mbs": target_mbs}, is_mixed)
    return (
        inputs_of_call((), {}, arg_mbs, kwarg_mbs, is_mixed=is_mixed),
        targets if target_mbs is not None or is_mixed else None,
        False,
    )


def inputs_of_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    arg_mbs: Any = None,
    kwarg_mbs: Any = None,
    *,
    is_mixed: bool = False,
) -> Any:
    """Return the inputs of a call without a target; ``is_mixed``: of both kinds."""
    lists = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs}
    lists = {name: entries for name, entries in lists.items() if entries is not None}
    if lists or is_mixed:
        return PreSplit(lists, is_mixed or bool(args or kwargs))
    if kwargs or len(args) > 1:
        return Arguments(args, kwargs)
    return args[0] if args else None


def as_arguments(inputs: Any) -> Arguments:
    """Return what the first layer is called with for a batch: a list's or a dict's items."""
    if isinstance(inputs, Arguments):
        return inputs
    if isinstance(inputs, dict):
        return Arguments(kwargs=inputs)
    return Arguments(tuple(inputs) if isinstance(inputs, list) else (inputs,))


def find_inputs_error(inputs: Any, num_microbatches: int, least: int) -> str | TypeError | None:
    """Return why inputs of ``least`` samples cannot be split into microbatches, or None."""
    if inputs is None:
        return missing("inputs", "the rank of the first stage")
    if isinstance(inputs, PreSplit):
        return inputs.find_error(num_microbatches)
    return _find_type_error(inputs) or find_size_error("inputs", inputs, least)


def find_size_error(name: str, value: Any, least: int) -> str | None:
    """Return why the tensors in a value have not ``least`` samples each, or None."""
    tensors = input_tensors(value)
    if not all(each.dim() for each in tensors):
        return (
            f"{name} must be of tensors whose first dimension is the batch, got one of shape "
            f"[] in {summarize(_plain(value))}"
        )
    sizes = sorted({len(each) for each in tensors})
    if len(sizes) == 1 and sizes[0] >= least:
        return None
    wanted, fix = f"at least one for each of the {least} microbatches", ""
    if least == 1:
        wanted = "at least one"
    elif len(sizes) == 1:
        fix = "; use drop_last=True, or a smaller num_microbatches"
    return f"{name} must have one number of samples, {wanted}, got {sizes}{fix}"


def find_argument_error(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """Return why a layer cannot be called so, by its signature or its own check, or None.

    That check is a method ``find_input_error(*args, **kwargs)``, which returns a sentence or None.
    """
    name = type(layer).__name__
    signature = _signature(layer)
    if signature is not None:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            return (
                f"the arguments must be those of the first layer, {name}"
                f"({', '.join(signature.parameters)}), got {len(args)} by position and "
                f"{', '.join(kwargs) or 'none'} by name: {error}"
            )
    find_input_error = getattr(layer, "find_input_error", None)
    if find_input_error is None:
        return None
    try:
        found: str | None = find_input_error(*args, **kwargs)
        what = None if found is None or isinstance(found, str) else summarize(found)
    except Exception as error:  # the other ranks wait for this one's first message
        what = f"{type(error).__name__}: {error}"
    if what is None:
        return found
    return f"find_input_error of the first layer, {name}, must return a str or None, got {what}"


def _signature(layer: nn.Module) -> inspect.Signature | None:
    """Return that of the layer's forward; None if hooks may change the arguments before it."""
    if layer._forward_pre_hooks:
        return None
    try:
        return inspect.signature(layer.forward)
    except ValueError:  # of a function in C
        return None


def missing(name: str, where: str) -> str:
    """Return the error of an argument that is None."""
    return f"{name} must be given on {where}, got None"


def _find_type_error(inputs: Any) -> str | TypeError | None:
    rule = "a tensor, a tuple of tensors, a list of arguments or a dict of keyword arguments"
    if not isinstance(inputs, Tensor | tuple | list | dict | Arguments):
        return wrong_type("inputs", rule, inputs)
    if isinstance(inputs, tuple) and not (
        inputs and all(isinstance(each, Tensor) for each in inputs)
    ):
        fix = "a list's items are the arguments of the first layer, of any type"
        return wrong_type("inputs", rule, inputs, fix)
    if not input_tensors(inputs):
        rule = f"{rule}, with a tensor to split into microbatches"
        return wrong_type("inputs", rule, _plain(inputs))
    if isinstance(inputs, dict) and not all(isinstance(key, str) for key in inputs):
        rule = "names of the first layer's arguments"
        return wrong_type("the keys of inputs", rule, list(inputs))
    return _find_mask_error(inputs)


def _find_mask_error(inputs: Any) -> str | None:
    """Return why FlexAttention's masks among the inputs cannot be given to each microbatch."""
    # Torch's schedules split a mask of several samples, together with its function.
    flex_attention = sys.modules.get("torch.nn.attention.flex_attention")
    mask = getattr(flex_attention, "BlockMask", ())
    masks = [each for each in tree_leaves(inputs) if isinstance(each, mask)]
    sizes = {len(each.kv_num_blocks) for each in masks} - {1}
    if not sizes:
        return None
    return (
        "inputs must have block masks that all samples share, with B=None, as each microbatch gets "
        f"the whole mask, got one of {min(sizes)} samples: create it in the layer instead, or "
        "split it by arg_mbs or kwarg_mbs"
    )


def _plain(inputs: Any) -> Any:
    return (inputs.args, inputs.kwargs) if isinstance(inputs, Arguments) else inputs
