"""Building a subnet, with fewer units and its own weights, and the full model's memory."""

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from .partition.cut_dim import CutDim
from .partition.tensor_cut import TensorCut
from .partition.unit_assignment import sizes


def build_subnet(
    module: nn.Module,
    cut_dims: Iterable[CutDim],
    cuts: Mapping[str, TensorCut],
    rank: int,
    num_ranks: int,
) -> nn.Module:
    """Return a copy of the module with one rank's number of units in every cut dimension.

    Tensors that are cut are zeros in their smaller shape, without copies of the full ones.
    """
    made: dict[int, Tensor] = {}
    for name, tensor in tensors_of(module).items():
        if name in cuts:
            made[id(tensor)] = _smaller(tensor, cuts[name].part_shape(rank, num_ranks))
    subnet = copy.deepcopy(module, made)
    for cut_dim in cut_dims:
        kept = sizes(cut_dim.units, num_ranks)[rank]
        for count in cut_dim.counts:
            setattr(subnet.get_submodule(count.module), count.attribute, kept * count.per_unit)
    return subnet


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and floating-point buffers by name: those that are cut or shared."""
    buffers = {name: b for name, b in module.named_buffers() if b.is_floating_point()}
    return {**dict(module.named_parameters()), **buffers}


def _smaller(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    # Like a slice of it, not of the bare shape: keeps the order of strides (channels_last).
    data = torch.zeros_like(tensor.detach()[tuple(slice(length) for length in shape)])
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data


def release(parameters: Iterable[nn.Parameter]) -> None:
    """Free the memory of floating-point parameters and their gradients; entries read as nan."""
    for parameter in parameters:
        nan = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
        parameter.data = nan.expand(parameter.shape)
        parameter.grad = None


def allocate(parameters: Iterable[nn.Parameter]) -> None:
    """Allocate the parameters' memory again, uninitialized."""
    for parameter in parameters:
        parameter.data = torch.empty(
            parameter.shape, dtype=parameter.dtype, device=parameter.device
        )


def is_released(parameter: nn.Parameter) -> bool:
    """Return whether the parameter's memory has been released."""
    return parameter.numel() > 1 and not any(parameter.stride())
