"""What a rank can find wrong with its module and optimizer before the first message."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..ops import FLOAT_DTYPES

NamedParameters = Sequence[tuple[str, nn.Parameter]]


def find_problem(
    parameters: NamedParameters, optimizer: Optimizer, process_group: dist.ProcessGroup | None
) -> str | None:
    """The first thing that forbids gossip with these trainable parameters, or None."""
    if not parameters:
        return "module must have parameters that require gradients, got none"
    return (
        _problem_of_layout(parameters)
        or _problem_of_device(parameters, process_group)
        or _problem_of_ownership(parameters, optimizer)
    )


def describe(parameters: NamedParameters) -> list[tuple[str, str]]:
    """What ranks must have in common, as facts for ``comm.agree``."""
    facts = [("number of parameters", str(len(parameters)))]
    for index, (name, parameter) in enumerate(parameters):
        dtype = str(parameter.dtype).removeprefix("torch.")
        facts.append((f"parameter {index}", f"{name} {dtype} {list(parameter.shape)}"))
    return facts


def _problem_of_layout(parameters: NamedParameters) -> str | None:
    for name, parameter in parameters:
        if parameter.layout != torch.strided:
            return f"parameters must be dense, got {name} with layout {parameter.layout}"
        if parameter.dtype not in FLOAT_DTYPES:
            return (
                f"parameters must be float32, bfloat16 or float16, got {name} of {parameter.dtype}"
            )
    return None


def _problem_of_device(
    parameters: NamedParameters, process_group: dist.ProcessGroup | None
) -> str | None:
    device = parameters[0][1].device
    for name, parameter in parameters:
        if parameter.device != device:
            return f"parameters must be on one device, got {name} on {parameter.device}"
    served = dist.get_backend_config(process_group)
    if f"{device.type}:" not in served:
        return f"process_group must serve {device.type} tensors, got one for {served}"
    return None


def _problem_of_ownership(parameters: NamedParameters, optimizer: Optimizer) -> str | None:
    owned: set[Any] = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in parameters:
        if id(parameter) not in owned:
            return f"optimizer must own all trainable parameters of the module, {name} is missing"
    foreign = len(owned - {id(parameter) for _, parameter in parameters})
    if foreign:
        return (
            "optimizer must own only trainable parameters of the module: others would never be "
            f"averaged; got {foreign} more"
        )
    return None
