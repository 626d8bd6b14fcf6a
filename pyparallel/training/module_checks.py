"""What trainers check of a module and its optimizers before any communication."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .arguments import check_type, find_ddp_error, require
from .checkpointing import plain_name, uncompiled
from .shards import is_sharded

NamedParameters = Sequence[tuple[str, nn.Parameter]]


def check_module(module: Any) -> None:
    """Raise a TypeError unless an argument is a plain module; a ValueError if it is lazy."""
    check_type("module", module, nn.Module, "a torch.nn.Module")
    if error := find_ddp_error("module", uncompiled(module)):
        raise error
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        got = f"{plain_name(name)}, which is lazy"
        require(not is_lazy(tensor), "module must have shapes", got, "run it once")


def check_whole(name: str, module: Any, fix: str) -> None:
    """Raise a ValueError if an argument is a module with DTensors, as ``fully_shard`` makes."""
    named = module.named_parameters() if isinstance(module, nn.Module) else ()
    found = next((plain_name(each) for each, p in named if is_sharded(p)), None)
    rule = f"{name} must have whole parameters on this rank"
    require(found is None, rule, f"{found}, which is a DTensor", fix)


def find_device_error(
    parameters: NamedParameters, process_group: dist.ProcessGroup | None
) -> str | None:
    """Return why parameters cannot be sent in a group, as its first rank's device, or None."""
    device = parameters[0][1].device
    for name, parameter in parameters:
        if parameter.device != device:
            return f"parameters must be on one device, got {name} on {parameter.device}"
    if not dist.is_initialized():
        return None
    backends = dist.get_backend_config(process_group)  # for example "cpu:gloo,cuda:nccl"
    backend = dict(pair.split(":") for pair in backends.split(",")).get(device.type)
    if backend is None or (backend == "gloo" and device.type != "cpu"):
        # Gloo's collectives accept CUDA tensors, its point-to-point messages do not.
        return f"process_group must exchange {device.type} tensors, got one for {backends}"
    return None


def find_master_weights_error(optimizer: object, name: str) -> str | None:
    """Return why an optimizer's master weights cannot be averaged, or None."""
    if not getattr(optimizer, "master_weights", False):
        return None
    return (
        f"{name} must have master_weights=False, got True: parameters are averaged with other "
        "ranks', not their float32 copies; train float32 parameters inside torch.autocast"
    )


def describe_tensors(kind: str, named: Sequence[tuple[str, Tensor]]) -> list[tuple[str, str]]:
    """Return a config field of each tensor, for ``check_consistent_across_ranks``."""
    return [
        (f"{kind} {index}", f"{plain_name(name)} {_describe_tensor(tensor)}")
        for index, (name, tensor) in enumerate(named)
    ]


def _describe_tensor(tensor: Tensor) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    # Flat buffers keep the memory format of a dense tensor, such as channels_last.
    if tensor.layout == torch.strided and not tensor.is_contiguous():
        text += f" with strides {list(tensor.stride())}"
    is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{text} frozen" if is_frozen else text
