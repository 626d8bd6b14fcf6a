"""Validation before subnets are cut: the configuration all ranks must share, and its errors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import training
from ..comm import Run, first_difference
from ..training.arguments import check_callable, check_integer, check_type, find_error, require
from ..training.module_checks import (
    check_module,
    check_whole,
    find_device_error,
    find_master_weights_error,
)
from ..training.trainer import find_owner_error
from .partition.cut_dim import CutDim
from .partition.partition import Partition
from .placement import Placement
from .shards import ModelShards
from .subnet import is_released

ConfigFields = list[tuple[str, str]]


def describe(module: nn.Module) -> ConfigFields:
    """Return the module as config fields for ``comm.check_consistent_across_ranks``."""
    named = [*module.named_parameters(), *module.named_buffers()]
    count = ("number of parameters and buffers", str(len(named)))
    return [count, *((f"tensor {i}", f"{n} {_describe(t)}") for i, (n, t) in enumerate(named))]


def describe_cut_dims(cut_dims: Sequence[CutDim]) -> ConfigFields:
    """Return the cut dimensions as config fields: equal tensors may still have different heads."""
    # These names are saved in checkpoints and compared when they are loaded.
    config_fields = [("number of widths", str(len(cut_dims)))]
    for index, each in enumerate(cut_dims):
        places = ", ".join(f"dimension {place.dim} of {place.tensor}" for place in each.places)
        what = f"{each.name} of {each.units} units along {places}"
        config_fields.append((f"width {index}", what))
    return config_fields


def examine(
    module: Any, optimizer_fn: object, policies: Mapping[str, Any], run: Run
) -> tuple[ConfigFields, str | TypeError | None]:
    """Return the config fields that ranks must share and this rank's error; never raises."""
    partition, interval = policies["partition"], policies["interval"]
    try:
        if type_error := find_error(lambda: _check_types(module, optimizer_fn, policies)):
            return [], type_error
        config_fields = [(name, repr(policy)) for name, policy in policies.items()]
        config_fields += describe(module)
        error_text = find_validation_error(
            module, partition, interval, policies["placement"], run.size, run.group
        )
        if error_text is None:
            config_fields += describe_cut_dims(partition.cut_dims(module))
    except Exception as error:  # check_consistent_across_ranks raises it on all ranks
        return [], f"{type(error).__name__}: {error}"
    return config_fields, error_text


def _check_types(module: object, optimizer_fn: object, policies: Mapping[str, Any]) -> None:
    check_module(module)
    fix = "train subnets of a plain module, each of which is smaller than the model, or take "
    check_whole("module", module, fix + "GossipDataParallel with mesh=, which trains its shards")
    rule = "a function of a list of parameters such as lambda p: torch.optim.SGD(p, lr=0.1)"
    check_callable("optimizer_fn", optimizer_fn, rule)
    partition = policies["partition"]
    fix = "wrap it, Partition(rules)" if isinstance(partition, Mapping) else ""
    check_type("partition", partition, Partition, "an object such as Partition()", fix)
    for name, examples, methods in (
        ("placement", "Sharded() or Central()", ["rows", "validation_error"]),
        ("optimizer_state", "CarryState() or ResetState()", ["carried_state", "on_new_round"]),
        ("scale", "Unscaled() or Averaged()", ["apply", "enlargement"]),
    ):
        if not training.has_methods(policies[name], *methods):
            raise training.wrong_type(name, f"an object such as {examples}", policies[name])


def find_validation_error(
    module: nn.Module,
    partition: Partition,
    interval: int,
    placement: Placement,
    num_ranks: int,
    process_group: dist.ProcessGroup | None,
) -> str | None:
    """Return the first error in the trainer's arguments, or None."""
    try:
        check_integer("interval", interval, rule="an integer number of steps, at least 1")
        _check_tensors(module)
        if error_text := find_device_error(list(module.named_parameters()), process_group):
            return error_text
        cut_dims = partition.cut_dims(module)
    except ValueError as error:
        return str(error)
    error_text = partition.find_units_error(cut_dims, num_ranks)
    return error_text or placement.validation_error(num_ranks)


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


def check_state(
    state: Any, own: Mapping[str, Any], shards: ModelShards, optimizer: Optimizer, run: Run
) -> None:
    """Raise on all ranks alike if one with the state ``own`` cannot load another; none changes."""
    training.check_on_all_ranks(lambda: _read_state(state, own, shards, optimizer), run.agree)


def _read_state(
    state: Any, own: Mapping[str, Any], shards: ModelShards, optimizer: Optimizer
) -> ConfigFields:
    got = training.summarize(state)
    require(isinstance(state, Mapping), "state_dict must be a result of state_dict()", got)
    training.check_format(state)
    (rank, size), place = ((each["rank"], each["num_ranks"]) for each in (own, state))
    rule = f"state_dict must be that of rank {rank} of {size}"
    fix = "with other ranks start from the full model"
    require(place == (rank, size), rule, f"one of {place}", fix)
    if difference := first_difference(own["config"], state["config"]):
        name, here, there = difference
        raise ValueError(f"state_dict must have the same {name}, {here}, got {there}")
    for key in ("round", "steps", "subnet"):
        training.check_like(state[key], own[key], key)
    shards.check_state(state["shards"], "shards")
    # Its class is in the config.
    training.check_optimizer_state(optimizer, state["optimizer"], "optimizer")
    return [("round of state_dict", str(state["round"]))]


def _check_tensors(module: nn.Module) -> None:
    trains = any(parameter.requires_grad for parameter in module.parameters())
    require(trains, "module must have parameters that require gradients", "none")
    for name, parameter in module.named_parameters():
        fits = parameter.layout == torch.strided and parameter.is_floating_point()
        got = f"{name} of {parameter.dtype} with layout {parameter.layout}"
        require(fits, "parameters must be dense and floating-point", got)
        got = f"{name}, released by another SubnetTrainer"
        fix = "copy the model inside its full_model()"
        require(not is_released(parameter), "parameters must have memory", got, fix)
    for name, buffer in module.named_buffers():
        is_expanded = any(
            s == 0 and n > 1 for s, n in zip(buffer.stride(), buffer.shape, strict=True)
        )
        require(not is_expanded, "buffers must not be expanded", name, "clone it")


def _describe(tensor: Tensor) -> str:
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {tensor.device.type}"
    return f"{text} frozen" if frozen else text
