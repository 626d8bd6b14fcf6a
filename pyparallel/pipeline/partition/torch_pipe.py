"""Models that were split for torch's own pipelines."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from ...training import find_ddp_error, wrong_type
from ...training.arguments import require


def layers_and_split(
    model: Any, split: Sequence[int] | None
) -> tuple[list[nn.Module], Sequence[int] | None]:
    """Return the layers of a model and its split, which torch's ``Pipe`` and stages define.

    A stage of torch's is one layer; an ``nn.Identity`` that never runs is in the place of others.
    A parameter of which a ``Pipe`` has given several stages copies is one again.
    """
    # Importing torch's pipelines takes a second; a caller with one of their objects has done it.
    pipelining = sys.modules.get("torch.distributed.pipelining")
    if pipelining is None:
        return _as_layers(model), split
    if isinstance(model, pipelining.Pipe):
        _tie_copies(model)
        modules = {index: model.get_stage_module(index) for index in range(model.num_stages)}
        return _one_layer_each(modules, model.num_stages, split)
    is_stage = isinstance(model, pipelining.PipelineStage)
    parts = [model] if is_stage else _as_layers(model)
    stages = [part for part in parts if isinstance(part, pipelining.PipelineStage)]
    if not stages:
        return parts, split
    modules = {stage.stage_index: stage.submod for stage in stages}
    return _one_layer_each(modules, stages[0].num_stages, split)


def _tie_copies(pipe: Any) -> None:
    for places in pipe.replicated_params:
        (first, name), *copies = places.items()
        parameter = pipe.split_gm.get_submodule(first).get_parameter(name)
        for stage, copied in copies:
            owner, _, leaf = copied.rpartition(".")
            setattr(pipe.split_gm.get_submodule(stage).get_submodule(owner), leaf, parameter)


def _as_layers(model: Any) -> list[Any]:
    if not isinstance(model, Iterable) or isinstance(model, str | Mapping | Tensor):
        rule = "an nn.Sequential, a list of modules, or a model that torch's pipelining has split"
        fix = "give its layers as a list, each called with the output of the previous one"
        raise find_ddp_error("layers", model) or wrong_type("layers", rule, model, fix)
    return list(model)


def _one_layer_each(
    modules: dict[int, nn.Module], num_stages: int, split: Sequence[int] | None
) -> tuple[list[nn.Module], Sequence[int]]:
    require(split is None, "split must be None for a model that is split already", repr(split))
    layers: list[nn.Module] = [
        UnpackInputs(modules[index]) if index in modules else nn.Identity()
        for index in range(num_stages)
    ]
    return layers, range(1, num_stages)


class UnpackInputs(nn.Module):
    """A wrapper that unpacks a tuple: torch's stages take arguments, ours take one value."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module: nn.Module = module

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        is_value = len(args) == 1 and not kwargs and isinstance(args[0], tuple)
        return self.module(*(args[0] if is_value else args), **kwargs)
