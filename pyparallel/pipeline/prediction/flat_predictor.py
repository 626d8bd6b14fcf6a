"""Prediction for all parameters of a stage at once, along the state of its optimizer."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...comm import FlatBuckets
from .flat_state import FlatState

LAST_GRADIENT = "last_gradient"

Group = Mapping[str, Any]


class FlatRule(Protocol):
    """How one kind of optimizer goes on, worked out on parameters that lie side by side."""

    def entries(self, group: Group) -> tuple[str, ...]:
        """What it reads of a parameter group's state.

        ``LAST_GRADIENT``, which optimizers do not keep, is kept for it: the gradient of the last
        step as the optimizer follows it, with weight decay and downward.
        """

    def predict(
        self, weights: Tensor, state: Mapping[str, Tensor], group: Group, horizon: int, out: Tensor
    ) -> None:
        """Write the weights ``horizon`` steps ahead.

        Args:
            weights: (n,) the live ones.
            state: its entries, (n,) each, zero where the optimizer has none; and ``step``, 0-d, if
                the optimizer counts steps and has taken some with these parameters.
            group: the parameter group, with the learning rate of the coming steps.
            horizon: at least 1.
            out: (n,), written.
        """


class _Run(NamedTuple):
    """Elements ``begin`` to ``end`` of a buffer: parameters that have taken as many steps."""

    bucket: int
    begin: int
    end: int
    first: nn.Parameter


class FlatWeightPredictor:
    """One stage's optimizer and the rule by which it goes on: one op for each flat buffer.

    Parameters that have taken fewer steps than others, because they had no gradient, are predicted
    apart where the optimizer counts steps.

    Args:
        optimizer: steps the parameters; its state is laid out flat.
        weights: one for each of its parameter groups.
        rule: how it goes on.
    """

    def __init__(
        self, optimizer: Optimizer, weights: Sequence[FlatBuckets], rule: FlatRule
    ) -> None:
        self._optimizer = optimizer
        self._weights = weights
        self._rule = rule
        self._states = [FlatState(optimizer, each) for each in weights]
        self._runs: dict[int, tuple[int, list[_Run]]] = {}

    def step(self, horizon: int = 0, out: Sequence[Tensor] = ()) -> None:
        """The optimizer's step, and then the prediction if there is a horizon."""
        remembered = []
        for index, group in enumerate(self._optimizer.param_groups):
            stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
            if len(stepped) < len(group["params"]):
                self._runs.clear()
            if LAST_GRADIENT in self._rule.entries(group):
                self._remember(index, group)
                remembered.append((self._states[index], stepped))
        self._optimizer.step()
        # Only now: some optimizers take a parameter that has any state for one that has all.
        for state, stepped in remembered:
            state.publish(LAST_GRADIENT, stepped)
        if horizon:
            self.predict(horizon, out)

    @torch.no_grad()
    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        """The live weights that many updates ahead; themselves before the first step."""
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
        flat = {name: self._states[index].buffers(name) for name in self._rule.entries(group)}
        for run in self._runs_of(index):
            part = slice(run.begin, run.end)
            state = {name: buffers[run.bucket][part] for name, buffers in flat.items()}
            steps = self._optimizer.state.get(run.first, {}).get("step")
            if steps is not None:
                state["step"] = steps
            weights = self._weights[index].buffers[run.bucket][part]
            self._rule.predict(weights, state, group, horizon, outputs[run.bucket][part])

    def _runs_of(self, index: int) -> list[_Run]:
        # Counts may lie on a GPU, which is asked only when they may have parted.
        num_layouts = self._states[index].num_layouts
        known = self._runs.get(index)
        if known is None or known[0] != num_layouts:
            known = self._runs[index] = num_layouts, self._find_runs(self._weights[index])
        return known[1]

    def _find_runs(self, weights: FlatBuckets) -> list[_Run]:
        runs = []
        for bucket, buffer in enumerate(weights.buffers):
            inside = [
                (segment.offset, parameter)
                for segment, parameter in zip(weights.segments, weights.parameters, strict=True)
                if segment.bucket == bucket
            ]
            groups = groupby(inside, lambda each: self._count(each[1]))
            firsts = [next(group) for _, group in groups]
            ends = [offset for offset, _ in firsts[1:]] + [buffer.numel()]
            for (begin, first), end in zip(firsts, ends, strict=True):
                runs.append(_Run(bucket, begin, end, first))
        return runs

    def _count(self, parameter: nn.Parameter) -> float | None:
        steps = self._optimizer.state.get(parameter, {}).get("step")
        return None if steps is None else float(steps)

    @torch.no_grad()
    def _remember(self, index: int, group: Group) -> None:
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
