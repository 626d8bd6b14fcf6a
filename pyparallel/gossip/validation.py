"""Checks of a rank's module and optimizer before any communication."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ..comm import Collectives, DisagreementError, Run, check_consistent_across_ranks
from ..ops import FLOAT_DTYPES
from ..optim import FusedOptimizer
from ..training import (
    CHECKSUMS_KEY,
    FORMAT_KEY,
    Algorithm,
    FlatBuckets,
    ModelAverager,
    check_on_all_ranks,
    join_buckets,
    summarize,
    wrong_type,
)
from ..training.arguments import check_type, is_number, require
from ..training.averager import as_optimizers
from ..training.module_checks import (
    NamedParameters,
    check_module,
    describe_tensors,
    find_device_error,
    find_master_weights_error,
)
from ..training.shards import local_of
from ..training.step_hook import name_optimizers
from ..training.trainer import find_owner_error
from .messages.replica_rounds import as_one_replica
from .push_sum.buffer import MASS_TOLERANCE

BUCKETS = "buckets"


def check_types(module: object, optimizer: object, bucket_cap_mb: object) -> None:
    """Raise a TypeError for the first argument of a wrong type."""
    check_module(module)
    rule = "a torch optimizer such as SGD(module.parameters(), lr=0.1)"
    check_type("optimizer", optimizer, (Optimizer, list, tuple), f"{rule}, or a list of them")
    for index, each in enumerate(as_optimizers(optimizer)):
        check_type(f"optimizer[{index}]", each, Optimizer, rule)
    if not (is_number(bucket_cap_mb) or bucket_cap_mb is None):
        raise wrong_type("bucket_cap_mb", "a number of MiB such as 25", bucket_cap_mb)


def resolve_group(
    process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> dist.ProcessGroup | None:
    """Return the process group of the ranks that train together: the given one, or the mesh's."""
    if mesh is None:
        return process_group
    check_type("mesh", mesh, DeviceMesh, "a DeviceMesh of one dimension such as mesh['replicate']")
    rule, fix = "mesh must have one dimension", "pass that of the replicas, mesh['replicate']"
    require(mesh.ndim == 1, rule, f"{mesh.ndim} of sizes {list(mesh.shape)}", fix)
    rule = "process_group must be None with mesh, whose group it is"
    require(process_group is None, rule, "both", "pass one of them")
    group: dist.ProcessGroup = mesh.get_group()
    return group


def check_together(
    config_fields: Sequence[tuple[str, str]],
    problem: str | TypeError | None,
    process_group: dist.ProcessGroup | None,
    mesh: Any,
    replica_group: dist.ProcessGroup | None,
) -> None:
    """Raise the same DisagreementError on all ranks that train together, in whatever groups.

    Ranks without a mesh compare in the default group. If the mesh is a dimension of one of two that
    has all its ranks, those with it compare the first field there too.
    """
    whole = None if mesh is None else mesh._get_root_mesh()  # there is no public name
    if whole is not None and whole.ndim == 2 and whole.size() == dist.get_world_size():
        check_consistent_across_ranks(config_fields[:1], problem)
    check_consistent_across_ranks(
        config_fields, problem, process_group, replica_group=replica_group
    )


def resolve_bucket_cap_mb(
    module: nn.Module, bucket_cap_mb: float | None, algorithm: Algorithm
) -> float:
    """Return the given approximate size of a bucket in MiB, or the default of the module's device.

    On the CPU a bucket is mixed while the next ones are received. On a GPU the host's work for an
    exchange takes longer than it takes NVLink to send 25 MiB, but not 256. Without overlap only the
    step of the next bucket hides a message: there are more of them.
    """
    if bucket_cap_mb is not None:
        return bucket_cap_mb
    if all(local_of(parameter).is_cpu for parameter in module.parameters()):
        return 25
    return 64 if getattr(algorithm, "overlap", None) == 0 else 256


def find_validation_error(
    module: nn.Module, optimizers: Sequence[Optimizer], process_group: dist.ProcessGroup | None
) -> str | None:
    """Return the first reason why a module's trainable parameters cannot be trained, or None."""
    parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not parameters:
        return "module must have parameters that require gradients, got none"
    return (
        find_owner_error(optimizers)
        or next(filter(None, (find_master_weights_error(o, "optimizer") for o in optimizers)), None)
        or _find_tensor_error([(name, local_of(p)) for name, p in parameters])
        or find_device_error(parameters, process_group)
        or _find_list_error(module, optimizers)
        or _find_ownership_error(module, parameters, optimizers)
    )


def describe(module: nn.Module) -> list[tuple[str, str]]:
    """Return the config fields of a module that ``check_consistent_across_ranks`` compares."""
    parameters, buffers = list(module.named_parameters()), list(module.named_buffers())
    config_fields = [
        ("number of parameters", str(len(parameters))),
        ("number of buffers", str(len(buffers))),
        ("device", ", ".join(sorted({each.device.type for _, each in [*parameters, *buffers]}))),
    ]
    config_fields += describe_tensors("parameter", parameters)
    return config_fields + describe_tensors("buffer", buffers)


def lay_out(module: nn.Module, optimizers: Sequence[Optimizer], cap_bytes: int) -> FlatBuckets:
    """Return buckets, of which parameters become views; those of fused optimizers first."""
    fused = [each for each in optimizers if isinstance(each, FusedOptimizer)]
    parts = [part for each in fused for part in each.lay_out(cap_bytes)]
    inside = {id(p) for part in parts for p in part.parameters}
    others = [p for p in module.parameters() if p.requires_grad and id(p) not in inside]
    return join_buckets([*parts, FlatBuckets(others, cap_bytes)])


def describe_groups(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[tuple[str, str]]:
    """Return a config field: the fused optimizers' groups, on which the buckets depend."""
    fused = [each for each in optimizers if isinstance(each, FusedOptimizer)]
    if not fused:
        return [(BUCKETS, "in the order of the module's parameters")]
    number = {id(p): index for index, p in enumerate(module.parameters()) if p.requires_grad}
    groups = [
        [number.pop(id(p)) for p in group["params"] if id(p) in number]
        for each in fused
        for group in each.param_groups
    ]
    if number:  # as if the others were one group more
        groups.append(list(number.values()))
    return [(BUCKETS, f"of the optimizer's parameter groups {groups}")]


def averagers_part(state: dict[str, Any]) -> dict[str, Any]:
    """Return an algorithm's saved state without the format number and the checksums."""
    return {key: each for key, each in state.items() if key not in (FORMAT_KEY, CHECKSUMS_KEY)}


def check_states_together(
    averager: ModelAverager,
    read: Callable[[], tuple[dict[str, Any], list[tuple[str, str]]]],
    run: Run,
) -> None:
    """Raise on all ranks alike if they cannot load their states together; change nothing.

    ``read`` returns the averager's state, and what must be equal on all ranks; it raises an error
    of any type if anything else cannot be loaded. The DisagreementError on all ranks is also of
    states of different rounds or steps, or of missing push-sum mass.
    """
    mass = 0.0

    def check() -> list[tuple[str, str]]:
        nonlocal mass
        state, fields = read()
        saved = averager.check_state(state)
        mass = saved.mass
        return [*fields, *((f"{key} of state_dict", str(n)) for key, n in saved.counters.items())]

    check_on_all_ranks(check, run.agree)
    total = torch.tensor(mass, dtype=torch.float64, device=averager.status.weight.device)
    collectives = Collectives(run)
    num_ranks = collectives.size
    with as_one_replica(run):
        collectives.all_reduce_(total)
        if not abs(total.item() - num_ranks) <= num_ranks * MASS_TOLERANCE:
            raise DisagreementError(
                f"the push-sum masses of all ranks' states must sum to {num_ranks}, the number of "
                f"ranks, got {total.item()}: load the files of one step on all ranks"
            )


def _find_tensor_error(parameters: Sequence[tuple[str, Tensor]]) -> str | None:
    for name, parameter in parameters:
        if parameter.layout != torch.strided:
            return f"parameters must be dense, got {name} with layout {parameter.layout}"
        if parameter.dtype not in (*FLOAT_DTYPES, torch.float64):
            rule = "parameters must be float32, float64, bfloat16 or float16"
            return f"{rule}, got {name} of {parameter.dtype}"
    return _find_overlap(parameters)


def _find_overlap(parameters: Sequence[tuple[str, Tensor]]) -> str | None:
    """Return that two parameters share a part of their memory, which flat buffers would not."""
    spans = [
        (p.data_ptr(), p.data_ptr() + p.nbytes, name)
        for name, p in parameters
        if p.numel() and p.is_contiguous() and not p.is_meta
    ]
    for (_, end, name), (begin, _, other) in pairwise(sorted(spans)):
        if begin < end:
            return (
                f"parameters must not share memory, got {name} and {other}, which overlap: use one "
                "parameter in both places"
            )
    return None


def _find_list_error(module: nn.Module, optimizers: Sequence[Optimizer]) -> str | None:
    if not optimizers:
        return "optimizer must be a torch optimizer or a list of them, got an empty list"
    names = name_optimizers(optimizers)
    owner: dict[int, int] = {}
    for index, each in enumerate(optimizers):
        first = next(i for i, other in enumerate(optimizers) if other is each)
        if first < index:
            return (
                f"optimizer must hold each optimizer once, got {names[first]} again as "
                f"optimizer[{index}]; remove one"
            )
        for p in (p for group in each.param_groups for p in group["params"]):
            other = owner.setdefault(id(p), index)
            if other != index:
                named = (name for name, mine in module.named_parameters() if mine is p)
                return (
                    f"a parameter must be in one optimizer, got {next(named, summarize(p))} in "
                    f"{names[other]} and {names[index]}; remove it from one of them"
                )
    return None


def _find_ownership_error(
    module: nn.Module, parameters: NamedParameters, optimizers: Sequence[Optimizer]
) -> str | None:
    given = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    owned = {id(p) for p in given}
    missing = [name for name, parameter in parameters if id(parameter) not in owned]
    if missing:
        rest = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        return (
            "optimizer must own all trainable parameters of the module, got one without "
            f"{', '.join(missing[:3])}{rest}; add them, or freeze them with requires_grad_(False)"
        )
    # Frozen parameters of the module may be among them, as in DistributedDataParallel.
    of_module = {id(p) for p in module.parameters()}
    others = [summarize(p) for p in given if id(p) not in of_module]
    if others:
        return (
            "optimizer must own only parameters of the module, as others would never be averaged, "
            f"got {len(others)} more, the first {others[0]}; wrap a module that holds all of them"
        )
    return None
