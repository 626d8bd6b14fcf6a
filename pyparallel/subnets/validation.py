"""Validation before subnets are cut: the configuration all ranks must share, and its errors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..training import has_methods, wrong_type
from ..training.arguments import is_integer
from ..training.module_checks import find_device_error, find_master_weights_error, find_module_error
from ..training.trainer import find_owner_error
from .partition.cut_dim import CutDim
from .partition.partition import Partition, find_units_error
from .placement import Placement
from .storage import is_released

ConfigFields = list[tuple[str, str]]


def describe(module: nn.Module) -> ConfigFields:
    """Return the module as config fields for ``comm.check_consistent_across_ranks``."""
    named = [*module.named_parameters(), *module.named_buffers()]
    config_fields = [("number of parameters and buffers", str(len(named)))]
    return config_fields + [
        (f"tensor {i}", f"{n} {_describe(t)}") for i, (n, t) in enumerate(named)
    ]


def describe_cut_dims(cut_dims: Sequence[CutDim]) -> ConfigFields:
    """Return the cut dimensions as config fields: equal tensors may still have different heads."""
    # These names are saved in checkpoints and compared when they are loaded.
    config_fields = [("number of widths", str(len(cut_dims)))]
    return config_fields + [
        (f"width {i}", _describe_cut_dim(cut_dim)) for i, cut_dim in enumerate(cut_dims)
    ]


def find_type_error(
    module: object,
    optimizer_fn: object,
    partition: object,
    placement: object,
    optimizer_state: object,
    scale: object,
) -> TypeError | None:
    """Return the first argument of a wrong type, as an error, or None."""
    if error := find_module_error(module):
        return error
    if not callable(optimizer_fn):
        rule = "a function of a list of parameters such as lambda p: torch.optim.SGD(p, lr=0.1)"
        return wrong_type("optimizer_fn", rule, optimizer_fn)
    if not isinstance(partition, Partition):
        fix = "wrap it, Partition(rules)" if isinstance(partition, Mapping) else ""
        return wrong_type("partition", "an object such as Partition()", partition, fix)
    for name, policy, examples, methods in (
        ("placement", placement, "Sharded() or Central()", ["rows", "validation_error"]),
        (
            "optimizer_state",
            optimizer_state,
            "CarryState() or ResetState()",
            ["carried_state", "on_new_round"],
        ),
        ("scale", scale, "Unscaled() or Averaged()", ["apply", "enlargement"]),
    ):
        if not has_methods(policy, *methods):
            return wrong_type(name, f"an object such as {examples}", policy)
    return None


def find_validation_error(
    module: nn.Module,
    partition: Partition,
    interval: int,
    placement: Placement,
    num_ranks: int,
    process_group: dist.ProcessGroup | None,
) -> str | None:
    """Return the first error in the trainer's arguments, or None."""
    if not is_integer(interval):
        return f"interval must be an integer number of steps, at least 1, got {interval!r}"
    parameters = list(module.named_parameters())
    error_text = (
        _find_parameter_error(parameters)
        or _find_buffer_error(module)
        or find_device_error(parameters, process_group)
    )
    if error_text:
        return error_text
    try:
        cut_dims = partition.cut_dims(module)
    except ValueError as error:
        return str(error)
    return find_units_error(cut_dims, num_ranks) or placement.validation_error(num_ranks)


def find_optimizer_error(optimizer: Any, parameters: Sequence[nn.Parameter]) -> str | None:
    """Return why an optimizer cannot train these parameters, or None."""
    if not isinstance(optimizer, Optimizer):
        return f"optimizer_fn must return a torch optimizer, got {type(optimizer).__name__}"
    if error := find_master_weights_error(optimizer, "the optimizer of optimizer_fn"):
        return error
    if error := find_owner_error([optimizer]):
        return error
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    wanted = {id(p) for p in parameters}
    if owned != wanted:
        return (
            "optimizer_fn must return an optimizer over exactly the parameters it is given, got "
            f"one that lacks {len(wanted - owned)} and has {len(owned - wanted)} others"
        )
    return None


def _find_parameter_error(parameters: Sequence[tuple[str, nn.Parameter]]) -> str | None:
    if not any(parameter.requires_grad for _, parameter in parameters):
        return "module must have parameters that require gradients, got none"
    for name, parameter in parameters:
        if is_lazy(parameter):
            return f"parameters must have shapes, got {name}, which is lazy; run the module once"
        if parameter.layout != torch.strided or not parameter.is_floating_point():
            return (
                f"parameters must be dense and floating-point, got {name} of {parameter.dtype} "
                f"with layout {parameter.layout}"
            )
        if is_released(parameter):
            return (
                f"parameters must have memory, got {name}, released by another SubnetTrainer; "
                "copy the model inside its full_model()"
            )
    return None


def _find_buffer_error(module: nn.Module) -> str | None:
    for name, buffer in module.named_buffers():
        if any(s == 0 and n > 1 for s, n in zip(buffer.stride(), buffer.shape, strict=True)):
            return f"buffers must not be expanded, got {name}; clone it"
    return None


def _describe_cut_dim(cut_dim: CutDim) -> str:
    places = ", ".join(f"dimension {place.dim} of {place.tensor}" for place in cut_dim.places)
    return f"{cut_dim.name} of {cut_dim.units} units along {places}"


def _describe(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "lazy"
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {tensor.device.type}"
    return f"{text} frozen" if frozen else text
