"""The names that tensors of stages have in the whole model."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ...training import plain_name
from .torch_pipe import UnpackInputs


def names_of_modules(model: Any, layers: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """Return the names in the whole model of the modules in the layers of all stages.

    A list has the whole model as ``model``, or is named as by ``nn.Sequential(*layers)``; torch's
    stages keep the names of the model that was split.
    """
    whole = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if isinstance(whole, nn.Module) and not any(isinstance(each, UnpackInputs) for each in layers):
        return {module: name for name, module in whole.named_modules()}
    names: dict[nn.Module, str] = {}
    for index, layer in enumerate(layers):
        root, prefix = layer, str(index)
        if isinstance(layer, UnpackInputs):
            root, prefix = layer.module, ""
        for name, module in root.named_modules(prefix=prefix):
            names.setdefault(module, name)
    return names


def plain_names(stage: nn.Module, names: Mapping[nn.Module, str]) -> dict[str, str]:
    """Return the names in the whole model of a stage's parameters and entries of its state dict."""
    paths = dict(stage.named_modules(remove_duplicate=False))
    keys = [*stage.state_dict(), *(name for name, _ in stage.named_parameters())]
    return {key: plain_name(_name_of(key, paths, names)) for key in keys}


def _name_of(key: str, paths: Mapping[str, nn.Module], names: Mapping[nn.Module, str]) -> str:
    path = key
    while path:
        path = path.rpartition(".")[0]
        module = paths.get(path) if path else None  # torch's checkpoint_wrapper is in no key
        if module is not None and (name := names.get(module)) is not None:
            return f"{name}{key[len(path) :]}".removeprefix(".")
    return key
