"""Slicing of layers into the modules of stages, and what travels between them besides."""

from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from ...training import uncompiled
from ...training.arguments import require
from ..runtime.stage_layers import Skippable, StageLayers
from .names import plain_names


@dataclass(frozen=True)
class Tie:
    """A parameter that several stages hold; the first of them owns it."""

    name: Mapping[int, str]
    parameter: nn.Parameter

    @property
    def stages(self) -> list[int]:
        """Return the stages that hold it, ascending."""
        return list(self.name)

    def __str__(self) -> str:
        owner, *_, last = self.stages
        return (
            f"{self.name[last]} of shape {list(self.parameter.shape)} on stages {owner} and {last}"
        )


class _Skip(NamedTuple):
    name: str
    first: int
    last: int


def slice_layers(
    layers: Sequence[nn.Module],
    split: Sequence[int],
    *,
    ties_travel: bool = False,
    names: Mapping[nn.Module, str] | None = None,
    own: Container[int] = (),
) -> list[StageLayers]:
    """Return one module per stage; each layer keeps its name in the whole model.

    With ``ties_travel`` tied parameters travel with the activations, in the version that the first
    stage's forward reads. ``names`` are of modules in the whole model, for stages in ``own``.
    """
    edges = [0, *split, len(layers)]
    parts = [
        OrderedDict((str(index), layers[index]) for index in range(begin, end))
        for begin, end in pairwise(edges)
    ]
    stages = [nn.Sequential(part) for part in parts]
    _check_no_shared_buffers(stages)
    skips = _find_skips(stages)
    lent: list[dict[str, nn.Parameter]] = [{} for _ in stages]
    borrowed: list[dict[str, str | None]] = [{} for _ in stages]
    for tie in find_ties(stages):
        owner, *readers = tie.stages
        skip = f"weight {tie.name[owner]}" if ties_travel else None
        for reader in readers:
            named = stages[reader].named_parameters(remove_duplicate=False)
            borrowed[reader].update((name, skip) for name, each in named if each is tie.parameter)
        if skip is not None:
            lent[owner][skip] = tie.parameter
            skips.append(_Skip(skip, owner, readers[-1]))
    return [
        StageLayers(
            parts[number],
            skips_in=[each.name for each in skips if each.first < number <= each.last],
            skips_out=[each.name for each in skips if each.first <= number < each.last],
            lent=lent[number],
            borrowed=borrowed[number],
            names={} if names is None or number not in own else plain_names(stage, names),
        )
        for number, stage in enumerate(stages)
    ]


def find_ties(stages: Sequence[nn.Module]) -> list[Tie]:
    """Return the parameters that several stages hold."""
    holders: dict[nn.Parameter, dict[int, str]] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            holders.setdefault(parameter, {})[number] = name
    return [Tie(names, parameter) for parameter, names in holders.items() if len(names) > 1]


def _check_no_shared_buffers(stages: Sequence[nn.Module]) -> None:
    """Raise a ValueError if two stages share a module with buffers: each would have its own."""
    stage_of: dict[nn.Module, int] = {}
    for number, stage in enumerate(stages):
        for name, module in stage.named_modules():
            owner = stage_of.setdefault(module, number)
            buffers = module._buffers.keys() - module._non_persistent_buffers_set
            rule = "layers must not share modules with buffers across stages"
            got = f"{type(module).__name__} {name} on stages {owner} and {number}"
            fix = "move the split, or give each stage its own"
            require(owner == number or not buffers, rule, f"{got}: {fix}")


def _find_skips(stages: Sequence[nn.Sequential]) -> list[_Skip]:
    """Return what ``Skippable`` layers stash, up to the last layer that pops it.

    A name stashed twice, popped before it is stashed, or never popped is a ValueError.
    """
    stashed: dict[str, int] = {}  # the stage of each name
    popped: dict[str, int] = {}  # the last one
    for number, stage in enumerate(stages):
        for index, layer in stage._modules.items():
            inner = uncompiled(layer) if layer is not None else None
            if not isinstance(inner, Skippable):
                continue
            for name in inner.pop:
                rule = "pop must name what an earlier layer has stashed"
                fix = f"stashed before it: {sorted(stashed) or 'nothing'}"
                require(name in stashed, rule, f"{name!r} in layers[{index}]", fix)
                popped[name] = number
            rule = "stash must be a name of its own for each layer"
            require(inner.stash not in stashed, rule, f"{inner.stash!r} again in layers[{index}]")
            if inner.stash is not None:
                stashed[inner.stash] = number
    for name in stashed:
        require(name in popped, "stash must be popped by a later layer", f"{name!r}, which is not")
    return [_Skip(name, number, popped[name]) for name, number in stashed.items()]
