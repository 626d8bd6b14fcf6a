"""Splitting a batch into microbatches, and checking it before any of them enters the pipeline."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ...training import summarize, wrong_type
from ...training.arguments import raise_problem
from ..messages import Value, tensors_of
from ..messages.format import NO_BATCH, BatchMeta, Refusal
from ..messages.refusals import refusal_of
from .batch_digest import BatchDigest
from .inputs import (
    Arguments,
    Inputs,
    PreSplit,
    as_arguments,
    find_argument_error,
    find_inputs_error,
    find_size_error,
    input_tensors,
    missing,
)
from .loss_weights import LossWeightFn, compute_loss_weights


class MicrobatchSplitter:
    """One step's batch, split along the first dimension as ``torch.tensor_split`` does.

    Of a batch that ``may_be_short`` the last microbatches may have no samples; their inputs are ().
    Inputs and target may be None on ranks without the stages that take them. Inputs are checked by
    the ``first_layer``, on the rank that calls it. ``has_short_form``: inputs and target are a
    call's two positional arguments. ``place``: rank and step, for errors. ``compares_targets``:
    whether ranks compare values of the target, which takes time.
    """

    def __init__(
        self,
        inputs: Any,
        target: Any,
        first: int,
        num_microbatches: int,
        loss_weight_fn: LossWeightFn | None = None,
        first_layer: nn.Module | None = None,
        *,
        has_short_form: bool = False,
        may_be_short: bool = False,
        place: str = "",
        compares_targets: bool = True,
    ) -> None:
        self.place = place
        self._compares_targets = compares_targets
        self._least = 1 if may_be_short else num_microbatches  # samples of a batch
        self._has_short_form = has_short_form
        self._inputs = _as_dict(inputs)
        self._target = _as_dict(target)
        self.first = first
        self._num_microbatches = num_microbatches
        self._loss_weight_fn = loss_weight_fn
        self._first_layer = first_layer
        self._received: dict[int, BatchMeta] = {}  # of microbatches from the previous rank
        self._mismatch: str | None = None
        self._copied: Collection[int] = ()

    def find_input_error(self) -> str | TypeError | None:
        """Return why the inputs cannot be split, or are not as many as the target, or None."""
        return self._input_error

    def find_target_error(self) -> str | TypeError | None:
        """Return why the target, or one of other samples than received, has no loss, or None."""
        if self._target_error is None and isinstance(self._weights, str):
            return self._weights
        return self._target_error or self._mismatch

    def refuse_inputs(self, error: Exception) -> Refusal:
        """Return the refusal of inputs of which the first stage's layers have raised an error."""
        rule = "inputs must be what the layers of the first stage take"
        problem = f"{rule}, got {type(error).__name__}: {error}{self._fix_of_pair}"
        return refusal_of(self.place, problem, error)

    @property
    def _fix_of_pair(self) -> str:
        """Return what may be wrong with inputs that are a pair, without a target; or nothing."""
        is_pair = isinstance(self._inputs, tuple | list) and len(self._inputs) == 2
        if not is_pair or self._target is not None:
            return ""
        return "; of a batch that is a pair of inputs and target, call step(*batch)"

    def copy(self, microbatches: Collection[int]) -> None:
        """Copy these once they are read: they are in flight when the caller may write to them."""
        self._copied = microbatches

    def inputs(self, microbatch: int) -> Any:
        """Return the inputs of a microbatch: a ``Value``, or ``Arguments``."""
        raise_problem(self._input_error)
        return self._part(self._split_inputs, microbatch)

    def target(self, microbatch: int) -> Any:
        """Return the target of a microbatch, in the structure of the batch's; raises as above."""
        raise_problem(self.find_target_error())
        return self._part(self._split_target, microbatch)

    def _part(self, split: list[Any], microbatch: int) -> Any:
        part = split[microbatch - self.first]
        return tree_map_only(Tensor, Tensor.clone, part) if microbatch in self._copied else part

    def share(self, microbatch: int) -> float:
        """Return a microbatch's fraction of the step's weights, or of the target's samples."""
        raise_problem(self.find_target_error())
        weights = self._weights
        assert not isinstance(weights, str), "which would be an error of the target"
        return weights[microbatch - self.first] / (sum(weights) or 1)

    @property
    def weight(self) -> float:
        """Return the sum of the step's weights; raises as ``target``."""
        raise_problem(self.find_target_error())
        assert not isinstance(self._weights, str), "which would be an error of the target"
        return sum(self._weights)

    def batch_meta(self, microbatch: int) -> BatchMeta:
        """Return what is sent with the activations of a microbatch, for ranks with targets."""
        if microbatch in self._received:
            return self._received[microbatch]
        if self._inputs is None or self._input_error is not None:
            return NO_BATCH
        samples, total = self._input_samples
        own = samples[microbatch - self.first]
        return BatchMeta(own, total, self._has_short_form, self._digest.value)

    def note_batch_meta(self, microbatch: int, batch: BatchMeta) -> None:
        """Have the target refused if the activations of a microbatch are of other samples."""
        if batch == NO_BATCH:
            return
        self._received[microbatch] = batch
        if self._target is not None and self._target_error is None and self._mismatch is None:
            self._mismatch = self._find_mismatch(microbatch, batch)

    def _find_argument_error(self) -> str | None:
        if self._first_layer is None:
            return None
        if not isinstance(self._inputs, PreSplit):
            called = as_arguments(self._inputs)
            error = find_argument_error(self._first_layer, called.args, called.kwargs)
            return error and error + self._fix_of_pair
        for microbatch, (args, kwargs) in enumerate(self._inputs.arguments(), self.first):
            error = find_argument_error(self._first_layer, args, kwargs)
            if error is not None:
                return f"microbatch {microbatch}: {error}"
        return None

    @cached_property
    def _digest(self) -> BatchDigest:
        is_read = self._compares_targets and not isinstance(self._target, PreSplit)
        return BatchDigest(self._target if is_read else None)

    def _find_mismatch(self, microbatch: int, batch: BatchMeta) -> str | None:
        if batch.has_short_form and not self._has_short_form:
            return (
                "target must be given by name on every rank or on none, got a second argument "
                "without a name on the rank of the first stage, which is the target there: pass "
                "target=..., or the first layer's arguments by name"
            )
        # With loss_weight_fn the first dimensions of target_mbs' entries may be of anything.
        any_sizes = isinstance(self._target, PreSplit) and self._loss_weight_fn is not None
        samples, total = self._target_samples
        for name, given, wanted in () if any_sizes else (
            ("inputs and target", batch.total, total),
            (f"microbatch {microbatch} of inputs and target", batch.samples,
             samples[microbatch - self.first]),
        ):  # fmt: skip
            if given and given != wanted:
                return (
                    f"{name} must have the same number of samples, got {given} and {wanted}: take "
                    "both from one batch"
                )
        if self._digest.differs_from(batch.target):
            return (
                "target must be of the same batch on all ranks, got other values than on the rank "
                "of the first stage: draw batches alike on all ranks (seed loaders, samplers and "
                "collators alike; no DistributedSampler within a pipeline), or pass target only "
                "on the ranks that read it"
            )
        return None

    @cached_property
    def _input_error(self) -> str | TypeError | None:
        error = find_inputs_error(self._inputs, self._num_microbatches, self._least)
        error = error or self._find_argument_error()
        if error or self._target is None or self._target_error:
            return error
        samples, total = self._input_samples
        for microbatch, own in enumerate(samples, self.first):
            error = error or self._find_mismatch(microbatch, BatchMeta(own, total))
        return error

    @cached_property
    def _target_error(self) -> str | TypeError | None:
        target, rule = self._target, "a tensor, or a tuple, list or dict of tensors"
        if target is None:
            where = "the rank of the last stage, with Interlocking on every rank"
            return missing("target", where) + self._fix_of_pair
        named = {"target": target}
        if isinstance(target, PreSplit):
            if (error := target.find_error(self._num_microbatches)) is not None:
                return error
            (entries,) = target.lists.values()
            named = {f"target_mbs[{index}]": each for index, each in enumerate(entries)}
        for name, each in named.items():
            leaves = tree_leaves(each)
            if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
                return wrong_type(name, rule, each)
        if not isinstance(target, PreSplit):
            return find_size_error("target", target, self._least)
        samples, _ = self._target_samples
        if self._loss_weight_fn is None and 0 in samples:
            index = samples.index(0)
            return (
                "target_mbs must have entries of tensors with one number of samples, their first "
                f"dimension, got {summarize(entries[index])} for target_mbs[{index}]: give "
                "loss_weight_fn where it is not the samples"
            )
        return None

    @cached_property
    def _weights(self) -> list[float] | list[int] | str:
        samples, total = self._target_samples
        if self._loss_weight_fn is None:
            return samples
        targets = self._split_target
        if not isinstance(self._target, PreSplit):
            targets = targets[:total]  # the others have none
        weights = compute_loss_weights(self._loss_weight_fn, targets, self.first)
        if isinstance(weights, str):
            return weights
        return weights + [0.0] * (self._num_microbatches - len(weights))

    @cached_property
    def _input_samples(self) -> tuple[list[int], int]:
        return self._samples(self._inputs, self._split_inputs)

    @cached_property
    def _target_samples(self) -> tuple[list[int], int]:
        return self._samples(self._target, self._split_target)

    def _samples(self, whole: Any, split: list[Any]) -> tuple[list[int], int]:
        """Return the numbers of samples of the microbatches, and of all; 0: not known."""
        if isinstance(whole, PreSplit):
            samples = [_num_samples(each) for each in split]
            return samples, sum(samples) if all(samples) else 0
        total = _num_samples(whole)
        least, rest = divmod(total, self._num_microbatches)
        return [least + (index < rest) for index in range(self._num_microbatches)], total

    @cached_property
    def _split_inputs(self) -> list[Inputs]:
        inputs = self._inputs
        if isinstance(inputs, PreSplit):
            given = [Arguments(*argument) for argument in inputs.arguments()]
            return [tree_map_only(Tensor, Tensor.detach, each) for each in given]
        split = self._split(as_arguments(inputs) if isinstance(inputs, list | dict) else inputs)
        sizes = zip(split, self._samples(inputs, split)[0], strict=True)
        return [each if samples else () for each, samples in sizes]

    @cached_property
    def _split_target(self) -> list[Any]:
        if isinstance(self._target, PreSplit):
            (entries,) = self._target.lists.values()
            return [tree_map_only(Tensor, Tensor.detach, entry) for entry in entries]
        return self._split(self._target)

    def _split(self, value: Any) -> list[Any]:
        leaves, structure = tree_flatten(value)
        # Detached: each microbatch's backward would go through a graph that the user made before.
        parts = [
            torch.tensor_split(leaf.detach(), self._num_microbatches)
            if isinstance(leaf, Tensor)
            else [leaf] * self._num_microbatches
            for leaf in leaves
        ]
        return [tree_unflatten(part, structure) for part in zip(*parts, strict=True)]


def concatenate(outputs: Sequence[Value]) -> Value:
    """Return the outputs of microbatches as one batch's; a ValueError if their shapes differ."""
    parts = [tensors_of(output) for output in outputs]
    shapes = [[list(tensor.shape) for tensor in part] for part in parts]
    if not all(map(all, shapes)) or len({str([s[1:] for s in shape]) for shape in shapes}) > 1:
        found = " and ".join(dict.fromkeys(", ".join(map(str, each)) for each in shapes))
        raise ValueError(
            "the outputs of microbatches must be of one shape but for dimension 0, the batch, to "
            f"be concatenated, got {found}; with arg_mbs or kwarg_mbs, given on the rank of the "
            "last stage too, predict returns a list"
        )
    whole = tuple(map(torch.cat, zip(*parts, strict=True)))
    return whole[0] if isinstance(outputs[0], Tensor) else whole


def _as_dict(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) and not isinstance(value, dict) else value


def _num_samples(value: Any) -> int:
    """Return the first dimension of all tensors of a batch; 0 if they have not one."""
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in input_tensors(value)}
    return sizes.pop() if len(sizes) == 1 else 0
