"""What enters the pipe in one call: microbatches of inputs, and of the targets they are for."""

from functools import cached_property

import torch
from torch import Tensor

from ...comm import Value, tensors_of


class MicrobatchSplitter:
    """One call's batch, cut along the first dimension; as even as can be, the first ones larger.

    Args:
        inputs: a tensor or tuple of tensors; None on ranks without the first stage.
        target: likewise for the last, or those whose stages have heads.
        first: the number of the call's first microbatch.
        num_microbatches: how many there are.
    """

    def __init__(
        self, inputs: Value | None, target: Value | None, first: int, num_microbatches: int
    ) -> None:
        self._inputs = inputs
        self._target = target
        self._first = first
        self._num_microbatches = num_microbatches

    def inputs(self, microbatch: int) -> Value:
        """The inputs of a microbatch.

        Raises:
            ValueError: the batch cannot be cut so.
        """
        return self._inputs_cut[microbatch - self._first]

    def target(self, microbatch: int) -> Value:
        """The target of a microbatch; raises as ``inputs``."""
        return self._target_cut[microbatch - self._first]

    def share(self, microbatch: int) -> float:
        """A microbatch's part of the call's samples."""
        parts = [len(tensors_of(part)[0]) for part in self._target_cut]
        return parts[microbatch - self._first] / sum(parts)

    @cached_property
    def _inputs_cut(self) -> list[Value]:
        return self._cut("inputs", "the rank of the first stage", self._inputs)

    @cached_property
    def _target_cut(self) -> list[Value]:
        where = "the rank of the last stage, with Interlocking on every rank"
        return self._cut("target", where, self._target)

    def _cut(self, name: str, where: str, value: Value | None) -> list[Value]:
        if value is None:
            raise ValueError(f"{name} must be given on {where}, got None")
        tensors = tensors_of(value)
        if not tensors or not all(isinstance(each, Tensor) and each.dim() for each in tensors):
            raise ValueError(
                f"{name} must be a tensor or tuple of tensors whose first dimension is the batch, "
                f"got {value!r}"
            )
        sizes = {len(each) for each in tensors}
        if len(sizes) > 1 or min(sizes) < self._num_microbatches:
            raise ValueError(
                f"{name} must have one number of samples, at least one for each of the "
                f"{self._num_microbatches} microbatches, got {sorted(sizes)}"
            )
        # A graph that the user has made before would be derived once for each microbatch.
        parts = [torch.tensor_split(each.detach(), self._num_microbatches) for each in tensors]
        if isinstance(value, Tensor):
            return list(parts[0])
        return list(zip(*parts, strict=True))
