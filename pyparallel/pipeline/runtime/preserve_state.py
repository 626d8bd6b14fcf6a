"""Contexts: modules restored after a trial run or an evaluation, and no autocast."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def preserving_state(layers: Sequence[nn.Module], inputs: Sequence[Tensor] = ()) -> Iterator[None]:
    """Restore what running layers changes, also after an error.

    That is ``parameter.grad`` (None inside), buffers, training modes, and torch's random number
    generators of the CPU and of the devices of layers and inputs.
    """
    modules = list({module: None for layer in layers for module in layer.modules()})
    parameters = list({p: None for module in modules for p in module.parameters()})
    tensors = [*parameters, *(b for module in modules for b in module.buffers()), *inputs]
    gradients, modes = _restored(parameters, "grad"), _restored(modules, "training")
    with gradients, _buffers(modules), modes, restoring(default_generators(tensors)):
        for parameter in parameters:
            parameter.grad = None
        yield


def default_generators(tensors: Iterable[Tensor]) -> list[torch.Generator]:
    """Return torch's default generators of the CPU and of the tensors' devices."""
    accelerator = torch.accelerator.current_accelerator()
    kind = "cuda" if accelerator is None else accelerator.type
    devices = {tensor.device.index for tensor in tensors if tensor.device.type == kind}
    if not devices:
        return [torch.default_generator]
    of_devices: Any = torch.get_device_module(kind)
    return [torch.default_generator, *(of_devices.default_generators[i] for i in devices)]


@contextmanager
def restoring(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Restore what generators will draw."""
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


@contextmanager
def evaluating(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Set all modules to evaluation mode, then restore each."""
    modules = [module for layer in layers for module in layer.modules()]
    with _restored(modules, "training"):
        for module in modules:
            module.training = False
        yield


def outside_autocast() -> ExitStack:
    """Disable the caller's autocast until the end of a ``with``, as torch advises for backwards."""
    disabled = ExitStack()
    for kind in filter(torch.is_autocast_enabled, _device_kinds()):
        disabled.enter_context(torch.autocast(kind, enabled=False))
    return disabled


def check_autocast() -> None:
    """Raise a RuntimeError inside autocast to float16."""
    kinds = filter(torch.is_autocast_enabled, _device_kinds())
    if any(torch.get_autocast_dtype(kind) == torch.float16 for kind in kinds):
        raise RuntimeError(
            "step must not be called inside autocast to float16 without an enabled grad_scaler, as "
            "its gradients need a loss scale; pass grad_scaler=GradScaler(enabled=True), with a "
            "schedule that flushes, or dtype=torch.bfloat16 to autocast"
        )


@functools.cache  # each backward asks
def _device_kinds() -> list[str]:
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


@contextmanager
def _restored(objects: Sequence[object], name: str) -> Iterator[None]:
    """Restore an attribute of several objects."""
    values = [getattr(each, name) for each in objects]
    try:
        yield
    finally:
        for each, value in zip(objects, values, strict=True):
            setattr(each, name, value)


@contextmanager
def _buffers(modules: list[nn.Module]) -> Iterator[None]:
    """Restore buffers and their contents, whether they were written to or replaced."""
    saved = [dict(module._buffers) for module in modules]
    tensors = [buffer for buffers in saved for buffer in buffers.values() if buffer is not None]
    contents = [buffer.clone() for buffer in tensors]
    try:
        yield
    finally:
        for module, buffers in zip(modules, saved, strict=True):
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, content in zip(tensors, contents, strict=True):
                buffer.copy_(content)
