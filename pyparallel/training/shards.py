"""Parameters that FSDP2 (``fully_shard``) has sharded: the part of each that this rank holds."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm import Collectives, Run
from .checkpointing import uncompiled


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, the live one; another tensor itself."""
    # By its attribute: DTensor's module takes long to import, and `to_local` records a gradient.
    shard: Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return local_of(tensor) is not tensor


def is_in_one_dimension(tensor: Any) -> bool:
    """Return whether a DTensor is in shards of one dimension, as of ``fully_shard``'s 1-D mesh."""
    return [type(placement).__name__ for placement in tensor.placements] == ["Shard"]


def padded_numel(tensor: Tensor) -> int:
    """Return how many elements FSDP2 sends of a parameter in an all-gather: equally many per rank.

    Shards are chunks of one dimension, of which the last may be shorter, or empty.
    """
    if not is_sharded(tensor):
        return tensor.numel()
    of_mesh: Any = tensor
    dim, num_shards = of_mesh.placements[0].dim, of_mesh.device_mesh.size()
    sizes = [-(-n // num_shards) if i == dim else n for i, n in enumerate(tensor.shape)]
    return math.prod(sizes)


def like(own: Tensor, shard: Tensor) -> Tensor:
    """Return a tensor of the shape of one's own shard as a DTensor if one's own is; no copy."""
    if not is_sharded(own) or is_sharded(shard) or shard.shape != local_of(own).shape:
        return shard
    from torch.distributed.tensor import DTensor  # takes long to import; here it is loaded

    spec: Any = own
    wrapped: Tensor = DTensor.from_local(
        shard,
        spec.device_mesh,
        spec.placements,
        run_check=False,
        shape=own.shape,
        stride=own.stride(),
    )
    return wrapped


def locals_of(state: Any) -> Any:
    """Return a state, of dicts, lists and tuples, with this rank's shards in place of DTensors."""
    if isinstance(state, Tensor):
        return local_of(state.detach()) if is_sharded(state) else state
    if isinstance(state, Mapping):
        return {key: locals_of(value) for key, value in state.items()}
    return type(state)(map(locals_of, state)) if type(state) in (list, tuple) else state


def move_shard(parameter: nn.Parameter, view: Tensor) -> None:
    """Make a view the memory of a parameter, or of this rank's shard of it."""
    if is_sharded(parameter):
        of_mesh: Any = parameter
        of_mesh._local_tensor = view
    else:
        parameter.data = view


def sharded_modules(module: nn.Module) -> list[Any]:
    """Return the modules that ``fully_shard`` has sharded within a module, in its order."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # takes long to import
    if fsdp is None:
        return []
    return [each for each in module.modules() if isinstance(each, fsdp.FSDPModule)]


def reshard(modules: Sequence[Any]) -> None:
    """Free gathered parameters, which would not follow what is written into the shards.

    A module is gathered after a forward without a backward.
    """
    for module in modules:
        module.reshard()


@torch.no_grad()
def follow(modules: Sequence[Any]) -> None:
    """Have the next all-gathers read the memory in which the shards now are."""
    for parameter in _sharded_parameters(modules):
        shard = local_of(parameter.sharded_param)
        sizes = parameter.padded_sharded_param_size
        strides = torch.empty(sizes, device="meta").stride()
        # An empty shard has its place too, and the padding behind a shard is zero.
        move_shard(parameter.sharded_param, shard.as_strided(sizes, strides))
        parameter.reset_sharded_param()
        move_shard(parameter.sharded_param, shard)


def _sharded_parameters(modules: Sequence[Any]) -> Iterator[Any]:
    """Return FSDP2's own record of each parameter, for which there is no public name."""
    for module in modules:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # several from torch 2.13 on
        for group in [state._fsdp_param_group] if groups is None else groups:
            if group is not None:
                yield from group.fsdp_params


def gather(replica: Run, numbers: Sequence[float]) -> list[list[float]]:
    """Return the numbers of all ranks that hold a replica; their hosts wait for each other."""
    row = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    rows: list[list[float]] = Collectives(replica).all_gather(row).tolist()
    return rows


def replica_group(module: nn.Module) -> dist.ProcessGroup | None:
    """Return the process group whose ranks together hold a module; None if each holds it whole.

    Parameters that are gathered are freed before.
    """
    reshard(sharded_modules(module))
    for parameter in module.parameters():
        if is_sharded(parameter):
            of_mesh: Any = parameter
            mesh = of_mesh.device_mesh
            group: dist.ProcessGroup | None = mesh.get_group() if mesh.ndim == 1 else None
            return group
    return None


def find_shard_error(module: nn.Module, replicas: Any) -> str | None:
    """Return why a module is not sharded for gossip between the ranks of a mesh, or None.

    ``replicas`` is the DeviceMesh of the ranks that hold the same shards; None: not given.
    """
    named = list(module.named_parameters())
    sharded = [name for name, p in named if is_sharded(p)]
    if replicas is None:
        if sharded:
            return (
                f"mesh must be given for a module that fully_shard has sharded, got none and "
                f"{sharded[0]}, which is a DTensor: pass the dimension of the replicas, such as "
                "mesh=mesh['replicate']"
            )
        return None
    plain = [name for name, p in named if not is_sharded(p)]
    if not sharded:
        return (
            "module must be sharded by fully_shard over another dimension of the mesh before it is "
            "wrapped, got plain parameters only; whole replicas take process_group=mesh.get_group()"
        )
    module = uncompiled(module)
    if not any(each is module for each in sharded_modules(module)):
        return (
            f"module must be sharded as a whole, got a root {type(module).__name__} that is not: "
            "call fully_shard(model, mesh=...) last, after that of its layers"
        )
    if plain:
        return (
            "parameters must all be sharded, as plain ones get another gradient on each shard's "
            f"rank, got {plain[0]} as a plain one beside {sharded[0]} as a DTensor: leave out "
            "ignored_params, and shard after the model is complete"
        )
    return _find_placement_error(named, replicas) or (
        "shards must not stay in pinned memory, got CPUOffloadPolicy(): use "
        "CPUOffloadPolicy(pin_memory=False)"  # no bucket is in pinned memory
        if any(parameter.pin_memory for parameter in _sharded_parameters(sharded_modules(module)))
        else None
    )


def _find_placement_error(named: Sequence[tuple[str, Any]], replicas: Any) -> str | None:
    first, mesh = named[0][0], named[0][1].device_mesh
    for name, p in named:
        if not is_in_one_dimension(p):
            return (
                "parameters must be sharded in one dimension, got "
                f"{name} with placements {list(p.placements)}: fully_shard(model, "
                "mesh=mesh['shard']) with the dimension of the shards alone, as gossip takes the "
                "place of the all-reduce over replicas"
            )
        if p.device_mesh != mesh:
            return f"parameters must be sharded over one mesh, got two, of {first} and {name}"
        if type(local_of(p)) is not Tensor:
            return f"shards must be plain tensors, got {name} of {type(local_of(p)).__name__}"
    shared = set(mesh.mesh.flatten().tolist()) & set(replicas.mesh.flatten().tolist())
    others = sorted(shared - {dist.get_rank()})
    if others:
        return (
            "mesh must have the ranks that hold the same shard of other replicas, got one with "
            f"rank {others[0]}, which holds another shard of this rank's replica: pass the "
            "dimension of the replicas, such as mesh=mesh['replicate']"
        )
    return None


def describe_shard(module: nn.Module) -> list[tuple[str, str]]:
    """Return a config field: which shard of the module this rank holds; none of a whole one."""
    found: Any = next(filter(is_sharded, module.parameters()), None)
    if found is None or found.device_mesh.ndim > 1:
        return []
    mesh = found.device_mesh
    return [("shard of the module", f"{mesh.get_local_rank()} of {mesh.size()}")]
