"""What ranks must have in common before subnets are cut, and what one of them can find wrong."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .partition.partition import Partition, find_narrow
from .partition.width import CutDim
from .placement import Placement
from .storage import is_released

Facts = list[tuple[str, str]]


def describe(module: nn.Module) -> Facts:
    """The module, as facts for ``comm.check_consistent_across_ranks``."""
    named = [*module.named_parameters(), *module.named_buffers()]
    config_fields = [("number of parameters and buffers", str(len(named)))]
    return config_fields + [
        (f"tensor {i}", f"{n} {_describe(t)}") for i, (n, t) in enumerate(named)
    ]


def describe_widths(widths: Sequence[CutDim]) -> Facts:
    """What is cut, as facts: modules with equal tensors may still have other heads."""
    config_fields = [("number of widths", str(len(widths)))]
    return config_fields + [
        (f"width {i}", _describe_width(width)) for i, width in enumerate(widths)
    ]


def find_validation_error(
    module: nn.Module,
    partition: Partition,
    interval: int,
    placement: Placement,
    num_ranks: int,
    process_group: dist.ProcessGroup | None,
) -> str | None:
    """The first thing that forbids to train subnets so, or None."""
    if not isinstance(partition, Partition):
        return f"partition must be a Partition, got {type(partition).__name__}"
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        return f"interval must be a whole number of steps from 1 up, got {interval!r}"
    parameters = list(module.named_parameters())
    problem = (
        _problem_of_parameters(parameters)
        or _problem_of_buffers(module)
        or _problem_of_device(parameters, process_group)
    )
    if problem:
        return problem
    try:
        widths = partition.widths(module)
    except ValueError as error:
        return str(error)
    return find_narrow(widths, num_ranks) or placement.validation_error(num_ranks)


def find_problem_of_optimizer(optimizer: Any, parameters: Sequence[nn.Parameter]) -> str | None:
    """Why an optimizer cannot train these parameters, or None."""
    if not isinstance(optimizer, Optimizer):
        return f"optimizer_fn must return a torch optimizer, got {type(optimizer).__name__}"
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    wanted = {id(p) for p in parameters}
    if owned != wanted:
        return (
            "optimizer_fn must return an optimizer over exactly the parameters it is given, got "
            f"one that lacks {len(wanted - owned)} and has {len(owned - wanted)} others"
        )
    return None


def _problem_of_parameters(parameters: Sequence[tuple[str, nn.Parameter]]) -> str | None:
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
                f"parameters must be there to be read, got {name}, which another SubnetTrainer "
                "holds; take a copy of what its assembled() yields"
            )
    return None


def _problem_of_buffers(module: nn.Module) -> str | None:
    for name, buffer in module.named_buffers():
        if any(s == 0 and n > 1 for s, n in zip(buffer.stride(), buffer.shape, strict=True)):
            return f"buffers must have memory for all entries, got {name}, expanded; clone it"
    return None


def _problem_of_device(
    parameters: Sequence[tuple[str, nn.Parameter]], process_group: dist.ProcessGroup | None
) -> str | None:
    device = parameters[0][1].device
    for name, parameter in parameters:
        if parameter.device != device:
            return f"parameters must be on one device, got {name} on {parameter.device}"
    if not dist.is_initialized():
        return None
    served = dist.get_backend_config(process_group)  # for example "cpu:gloo,cuda:nccl"
    backend = dict(pair.split(":") for pair in served.split(",")).get(device.type)
    if backend is None or (backend == "gloo" and device.type != "cpu"):
        return f"process_group must exchange {device.type} tensors, got one for {served}"
    return None


def _describe_width(width: CutDim) -> str:
    places = ", ".join(f"dimension {place.dim} of {place.tensor}" for place in width.places)
    return f"{width.name} of {width.units} units along {places}"


def _describe(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "lazy"
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {tensor.device.type}"
    return f"{text} frozen" if frozen else text
