"""The inputs and outputs of a stage's module, their gradients, and what follows them when sent."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...training import uncompiled
from ..messages import Value, tensors_of
from .clipping import LastNormClipper
from .inputs import Arguments, Inputs
from .options import StageOptions


def check_value(output: Any, module: nn.Module | None = None) -> Value:
    """Return a layer's output, or raise a TypeError unless it is a tensor or a tuple of tensors."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple) and all(isinstance(each, Tensor) for each in output):
        return output
    what = type(output).__name__
    if isinstance(output, tuple):
        what = f"a tuple with {', '.join(sorted({type(each).__name__ for each in output}))}"
    whose = "a layer's output"
    if isinstance(module, nn.Sequential) and len(module):
        name, last = list(module.named_children())[-1]
        whose = f"the output of layers[{name}], {type(uncompiled(last)).__name__},"
    raise TypeError(
        f"{whose} must be a tensor or a tuple of tensors, got {what}; return the tensors "
        "themselves, or wrap the layer in a module that does"
    )


class _NonLeaf(torch.autograd.Function):
    """The same memory, but not a leaf: in-place operations may write to it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def as_non_leaf(value: Inputs) -> Inputs:
    """Return a value as the previous layer would in one process, whose output is no leaf."""
    if isinstance(value, Arguments):  # of a batch: no tensor in them requires a gradient
        return value
    # Torch leaves Function.apply without types.
    result = tuple(_NonLeaf.apply(t) if t.requires_grad else t for t in tensors_of(value))  # type: ignore[no-untyped-call]
    if isinstance(value, Tensor):
        return result[0]
    return type(value)(*result) if hasattr(value, "_fields") else result  # a batch's NamedTuple


def shares_storage(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    """Return whether another tensor begins in the memory of a tensor's storage."""
    storage = tensor.untyped_storage()
    begin = storage.data_ptr()
    end = begin + storage.nbytes()
    return any(begin <= other.data_ptr() < end for other in others)


class ExtraTensors:
    """The tensors that a stage appends to its outputs, and to the gradients of its inputs.

    To outputs a squared norm, if updates are clipped: 0-d, or 1-d if the output is a tuple. To the
    gradients of an update's last microbatch a squared norm; then ``found_inf``, 0-d and bool, if
    updates are skipped on the device. Norms are integers, which compressors leave as they are.
    """

    def __init__(self, clipper: LastNormClipper | None, options: StageOptions) -> None:
        self._clipper = clipper
        self._sends_found_inf = options.sends_found_inf
        self._every = options.microbatches_per_update

    def append_to_output(self, output: Value) -> Value:
        """Return what is sent to the next stage for a forward's output."""
        if self._clipper is None:
            return output
        bits = self._clipper.norm_up_to_here(device_of(output)).view(torch.int64)
        return (output, bits) if isinstance(output, Tensor) else (*output, bits.view(1))

    def take_from_inputs(self, inputs: Value) -> Value:
        """Return what the previous stage has output, and keep what followed it."""
        if self._clipper is None:
            return inputs
        *own, bits = tensors_of(inputs)
        self._clipper.note_earlier(bits.view(torch.float64).view(()))
        return tuple(own) if bits.dim() else own[0]

    def append_to_gradients(
        self,
        gradients: tuple[Tensor, ...],
        microbatch: int,
        parameters: Iterable[nn.Parameter],
        device: torch.device,
        found_inf: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Return what is sent to the previous stage; ``found_inf`` None: the host knows it."""
        if self._clipper is not None and self._ends_update(microbatch):
            accumulated = [each.grad for each in parameters]
            norm = self._clipper.norm_from_here(accumulated, device)
            gradients = *gradients, norm.view(torch.int64)
        return gradients if found_inf is None else (*gradients, found_inf)

    def take_from_gradients(
        self, gradients: Value, microbatch: int
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return the output gradients of a backward, and ``found_inf`` if it followed them."""
        own, found_inf = tensors_of(gradients), None
        if self._sends_found_inf:
            *rest, found_inf = own
            own = tuple(rest)
        if self._clipper is not None and self._ends_update(microbatch):
            *rest, bits = own
            self._clipper.note_later(bits.view(torch.float64))
            own = tuple(rest)
        return own, found_inf

    def _ends_update(self, microbatch: int) -> bool:
        return (microbatch + 1) % self._every == 0


def device_of(value: Value) -> torch.device:
    """Return the device of a value's first tensor; the CPU without one."""
    return next((each.device for each in tensors_of(value)), torch.device("cpu"))
