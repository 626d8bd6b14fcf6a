"""Weight prediction on flat buffers: one op for all parameters of a bucket."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ...optim import SGD, FusedOptimizer
from ...training import FlatBuckets
from .base import WeightPredictor
from .flat_state import FlatState, check_dtypes

LAST_GRADIENT = "last_gradient"

COUNTERS = "step", "mu_product"  # 0-d, the same for parameters with equally many steps

Group = Mapping[str, Any]


class FlatRule(Protocol):
    """Protocol of the prediction rule of one class of optimizers, on flat buffers."""

    def state_names(self, group: Group) -> tuple[str, ...]:
        """Return the names of the optimizer state that the rule reads for a parameter group.

        Optimizers do not keep ``LAST_GRADIENT``, so the predictor keeps it for the rule: the
        gradient of the last step with weight decay added, negated with ``maximize``.
        """

    def predict(
        self, weights: Tensor, state: Mapping[str, Tensor], group: Group, horizon: int, out: Tensor
    ) -> None:
        """Write the weights ``horizon`` steps ahead to ``out``, both (n,).

        ``state`` has the named tensors, (n,) each, zero where the optimizer has none; and ``step``
        and ``mu_product``, 0-d, if it has these and has stepped these parameters. ``group`` has the
        learning rate of the next steps.
        """


class _Range(NamedTuple):
    """Elements ``begin`` to ``end`` of a buffer, whose parameters have had equally many steps."""

    bucket: int
    begin: int
    end: int
    first: nn.Parameter


class FlatWeightPredictor(WeightPredictor):
    """A predictor of one stage's weights, with one op for each flat buffer of state as of weights.

    Parameters that have had fewer steps than others, for lack of gradients, are predicted apart.
    """

    def __init__(
        self, optimizer: Optimizer, weights: Sequence[FlatBuckets], rule: FlatRule
    ) -> None:
        check_dtypes(weights)
        self._optimizer = optimizer
        self._weights = weights
        self._rule = rule
        self._states = [FlatState(optimizer, each) for each in weights]
        self._ranges: dict[int, tuple[int, list[_Range]]] = {}

    @override
    def step(self, horizon: int = 0, out: Sequence[Tensor] = (), delayed: bool = True) -> None:
        recorded = []
        for index, group in enumerate(self._optimizer.param_groups):
            stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
            if len(stepped) < len(group["params"]):
                self._ranges.clear()
            if LAST_GRADIENT in self._rule.state_names(group):
                self._record_gradients(index, group)
                recorded.append((self._states[index], stepped))
        self._optimizer.step()
        # Only now: some optimizers assume that a parameter with any state has all of it.
        for state, stepped in recorded:
            state.publish(LAST_GRADIENT, stepped)
        if horizon:
            self.predict(horizon, out)

    @override
    @torch.no_grad()
    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        rest = iter(out)
        for index, group in enumerate(self._optimizer.param_groups):
            buffers = self._weights[index].buffers
            outputs = [next(rest) for _ in buffers]
            if any(parameter in self._optimizer.state for parameter in group["params"]):
                self._predict_group(index, group, horizon, outputs)
            else:
                for output, buffer in zip(outputs, buffers, strict=True):
                    output.copy_(buffer)

    def _predict_group(self, index: int, group: Group, horizon: int, outputs: list[Tensor]) -> None:
        flat = {name: self._states[index].buffers(name) for name in self._rule.state_names(group)}
        for each in self._ranges_of(index):
            part = slice(each.begin, each.end)
            state = {name: buffers[each.bucket][part] for name, buffers in flat.items()}
            of_first = self._optimizer.state.get(each.first, {})
            state.update({name: of_first[name] for name in COUNTERS if name in of_first})
            weights = self._weights[index].buffers[each.bucket][part]
            self._rule.predict(weights, state, group, horizon, outputs[each.bucket][part])

    def _ranges_of(self, index: int) -> list[_Range]:
        # Step counts may be on a GPU: read them only when they may differ, to avoid host syncs.
        num_changes = self._states[index].num_changes
        known = self._ranges.get(index)
        if known is None or known[0] != num_changes:
            known = self._ranges[index] = num_changes, self._find_ranges(self._weights[index])
        return known[1]

    def _find_ranges(self, weights: FlatBuckets) -> list[_Range]:
        ranges = []
        for bucket, buffer in enumerate(weights.buffers):
            inside = [
                (segment.offset, parameter)
                for segment, parameter in zip(weights.segments, weights.parameters, strict=True)
                if segment.bucket == bucket
            ]
            groups = groupby(inside, lambda each: self._num_steps(each[1]))
            firsts = [next(group) for _, group in groups]
            ends = [offset for offset, _ in firsts[1:]] + [buffer.numel()]
            for (begin, first), end in zip(firsts, ends, strict=True):
                ranges.append(_Range(bucket, begin, end, first))
        return ranges

    def _num_steps(self, parameter: nn.Parameter) -> float | None:
        steps = self._optimizer.state.get(parameter, {}).get("step")
        return None if steps is None else float(steps)

    @torch.no_grad()
    def _record_gradients(self, index: int, group: Group) -> None:
        views, parameters = self._states[index].views(LAST_GRADIENT), group["params"]
        pairs = [
            (view, parameter.grad)
            for view, parameter in zip(views, parameters, strict=True)
            if parameter.grad is not None
        ]
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
        gradients = self._states[index].buffers(LAST_GRADIENT)
        for gradient, buffer in zip(gradients, self._weights[index].buffers, strict=True):
            if group["maximize"]:
                gradient.neg_()
            if group["weight_decay"]:
                gradient.add_(buffer, alpha=float(group["weight_decay"]))
        for view, parameter in zip(views, parameters, strict=True):
            if parameter.grad is None:
                view.zero_()


class FusedPredictor(WeightPredictor):
    """A predictor of an optimizer of ``pyparallel.optim``: its step writes the prediction.

    Unless something may write the weights after the pass: then it is predicted after the step.
    """

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._optimizer = optimizer
        self._horizon = 0
        self._out: Sequence[Tensor] = ()
        if isinstance(optimizer, SGD):
            optimizer.keeps_last_gradient = True
        optimizer.adopt(self._step_buckets)

    @override
    def step(self, horizon: int = 0, out: Sequence[Tensor] = (), delayed: bool = True) -> None:
        in_pass = self._optimizer.ends_with_pass
        self._horizon, self._out = (horizon, out) if in_pass else (0, ())
        self._optimizer.step()  # with its hooks, as a scheduler needs them
        if horizon and not in_pass:
            self.predict(horizon, out)

    @override
    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        for index, output in enumerate(out):
            self._optimizer.predict_bucket(index, horizon, output)

    def _step_buckets(self, optimizer: FusedOptimizer) -> None:
        for index in range(optimizer.num_buckets):
            prediction = self._out[index] if self._horizon else None
            optimizer.step_bucket(index, horizon=self._horizon, prediction=prediction)
