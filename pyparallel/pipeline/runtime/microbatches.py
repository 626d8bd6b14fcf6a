"""Splitting a batch into microbatches."""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from ...comm import Value, summarize, tensors_of


class MicrobatchSplitter:
    """One step's batch, split along the first dimension as ``torch.tensor_split`` does.

    Args:
        inputs: a tensor or tuple of tensors; None on ranks without the first stage.
        target: likewise for the last stage, or stages with heads.
        first: the number of the step's first microbatch.
        num_microbatches: how many parts.
    """

    place = ""  # rank and step, for errors

    def __init__(
        self, inputs: Value | None, target: Value | None, first: int, num_microbatches: int
    ) -> None:
        self._inputs = inputs
        self._target = target
        self._first = first
        self._num_microbatches = num_microbatches

    def inputs(self, microbatch: int) -> Value:
        """Return the inputs of a microbatch.

        Raises:
            ValueError: the batch is missing, not of tensors, or too small to split.
        """
        return self._split_inputs[microbatch - self._first]

    def target(self, microbatch: int) -> Value:
        """Return the target of a microbatch; raises as ``inputs``."""
        return self._split_target[microbatch - self._first]

    def find_input_error(self) -> str | TypeError | None:
        """Return what is wrong with the inputs, or None."""
        try:
            _ = self._split_inputs
        except ValueError as error:
            return str(error)
        return None

    def find_target_error(self) -> str | TypeError | None:
        """Return what is wrong with the target, or None."""
        try:
            _ = self._split_target
        except ValueError as error:
            return str(error)
        return None

    def share(self, microbatch: int) -> float:
        """Return a microbatch's fraction of the step's samples."""
        parts = [len(tensors_of(part)[0]) for part in self._split_target]
        return parts[microbatch - self._first] / sum(parts)

    @cached_property
    def _split_inputs(self) -> list[Value]:
        return self._split("inputs", "the rank of the first stage", self._inputs)

    @cached_property
    def _split_target(self) -> list[Value]:
        where = "the rank of the last stage, with Interlocking on every rank"
        return self._split("target", where, self._target)

    def _split(self, name: str, where: str, value: Value | None) -> list[Value]:
        if value is None:
            raise ValueError(f"{name} must be given on {where}, got None")
        tensors = tensors_of(value)
        if not tensors or not all(isinstance(each, Tensor) and each.dim() for each in tensors):
            raise ValueError(
                f"{name} must be a tensor or tuple of tensors whose first dimension is the batch, "
                f"got {summarize(value)}"
                + ("; pass a tuple of its tensors" if isinstance(value, Mapping) else "")
            )
        sizes = {len(each) for each in tensors}
        if len(sizes) > 1 or min(sizes) < self._num_microbatches:
            fix = "" if len(sizes) > 1 else "; use drop_last=True, or fewer microbatches"
            raise ValueError(
                f"{name} must have one number of samples, at least one for each of the "
                f"{self._num_microbatches} microbatches, got {sorted(sizes)}{fix}"
            )
        # Detached: each microbatch's backward would go through a graph that the user made before.
        parts = [torch.tensor_split(each.detach(), self._num_microbatches) for each in tensors]
        if isinstance(value, Tensor):
            return list(parts[0])
        return list(zip(*parts, strict=True))
