"""What torch's optimizers step and the fused ones refuse: each naming torch's as the way out."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..ops import FLOAT_DTYPES
from ..training.arguments import require
from ..training.shards import is_in_one_dimension, is_sharded, local_of


def check_options(group: dict[str, Any], name: str) -> None:
    """Raise a ValueError on an option that only torch's optimizer of that name has."""
    for option in ("amsgrad", "differentiable"):
        rule, got = f"{option} must be False for pyparallel.optim.{name}", group.get(option)
        require(not got, rule, got, f"use torch.optim.{name}")


def check_parameters(parameters: list[Tensor], name: str) -> None:
    """Raise a ValueError on parameters of a group that only torch's optimizer can step."""
    if len(set(map(id, parameters))) < len(parameters):
        raise ValueError(
            "params must hold each parameter once, got one twice in a group; use "
            f"torch.optim.{name}, which steps it twice"
        )
    for index, parameter in enumerate(parameters):
        fault = _find_fault(parameter)
        rule = (
            f"parameters of pyparallel.optim.{name} must be dense tensors of float32, bfloat16 or "
        )
        got = f"{fault} as number {index} of a group"
        rule += "float16 that no other process shares"
        require(fault is None, rule, got, f"use torch.optim.{name}")


def check_apart(parameters: Iterable[Tensor]) -> None:
    """Raise a ValueError if two share memory: as views of buckets they would not any more."""
    tensors = list(map(local_of, parameters))
    extents = sorted((p.data_ptr(), p.nbytes) for p in tensors if p.numel() and not p.is_meta)
    apart = all(begin + length <= other for (begin, length), (other, _) in pairwise(extents))
    fix = "register one nn.Parameter in both modules, or use torch's optimizer"
    require(apart, "parameters must not share memory", "two that overlap", fix)


def check_unsharded(parameters: Iterable[Tensor], name: str) -> None:
    """Raise a ValueError on shards, whose memory only a trainer can move together with FSDP2."""
    found = sum(map(is_sharded, parameters))
    rule = f"parameters of pyparallel.optim.{name} that fully_shard has sharded must be stepped"
    rule += " in a GossipDataParallel with mesh="
    require(not found, rule, f"{found} in none", f"use torch.optim.{name}")


def _find_fault(parameter: Tensor) -> str | None:
    if is_lazy(parameter):
        return None  # its dtype may still change
    if is_sharded(parameter) and is_in_one_dimension(parameter):
        parameter = local_of(parameter)
    if type(parameter) not in (Tensor, nn.Parameter):
        return f"a {type(parameter).__name__}"
    if parameter.layout != torch.strided:
        return f"one of layout {parameter.layout}"
    if parameter.dtype not in FLOAT_DTYPES:
        return f"one of {str(parameter.dtype).removeprefix('torch.')}"
    if parameter.device.type == "cpu" and parameter.is_shared():
        return "one in shared memory"  # a bucket would be this process's own
    return None
