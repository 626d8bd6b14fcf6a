"""A subnet: the module with fewer units, and weights of its own."""

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from .partition.sampling import sizes
from .partition.tensor_cut import TensorCut
from .partition.width import CutDim


def build_subnet(
    module: nn.Module,
    widths: Iterable[CutDim],
    cuts: Mapping[str, TensorCut],
    rank: int,
    num_ranks: int,
) -> nn.Module:
    """A copy of the module with one rank's share of every width.

    What is cut is made anew, in its smaller shape and zero, without a copy of the whole; all else
    is copied. The module itself must be on its device and of its dtype.
    """
    made: dict[int, Tensor] = {}
    for name, tensor in tensors_of(module).items():
        if name in cuts:
            made[id(tensor)] = _smaller(tensor, cuts[name].part_shape(rank, num_ranks))
    subnet = copy.deepcopy(module, made)
    for width in widths:
        kept = sizes(width.units, num_ranks)[rank]
        for count in width.counts:
            setattr(subnet.get_submodule(count.module), count.attribute, kept * count.per_unit)
    return subnet


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and floating-point buffers by name: what subnets have in common or cut."""
    buffers = {name: b for name, b in module.named_buffers() if b.is_floating_point()}
    return {**dict(module.named_parameters()), **buffers}


def _smaller(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    # Of a part of it, not of the shape: then strides are in its order (channels_last).
    data = torch.zeros_like(tensor.detach()[tuple(slice(length) for length in shape)])
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data
