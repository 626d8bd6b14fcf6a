"""Weight prediction by the optimizer's own rule: its last step, repeated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from typing_extensions import override

from ...comm import FlatBuckets
from ...optim import FusedOptimizer
from .base import Prediction, WeightPredictor
from .flat_predictor import FlatRule, FlatWeightPredictor, Group
from .fused_predictor import FusedPredictor
from .optimizer_rules import AdamRule, RMSpropRule, SGDRule


@runtime_checkable
class PredictsStep(Protocol):
    """Protocol of an optimizer, or of an object beside it, that predicts the optimizer's steps."""

    def displacement(
        self, parameter: nn.Parameter, state: Mapping[str, Any], group: Group, horizon: int
    ) -> Tensor:
        """Compute what the next ``horizon`` steps will add to a parameter; change nothing.

        Args:
            parameter: with its current value.
            state: the optimizer's state of it, never empty.
            group: its parameter group, with the learning rate of the next steps.
            horizon: number of steps, at least 1.

        Returns:
            A tensor of the parameter's shape.
        """


@dataclass(frozen=True, repr=False)
class Displacement(Prediction):
    """PipeOptim's prediction: the last step is repeated (Guan et al., arXiv 2312.00839).

    Predicts ``weights - lr * horizon * D``, where D is, for torch's optimizers,

    * SGD: the momentum buffer (SpecTrain's rule), or the last gradient without momentum;
    * Adam, AdamW: ``m_hat / (sqrt(v_hat) + eps)``; decoupled weight decay is not predicted;
    * RMSprop: the momentum buffer, or ``g / (sqrt(v) + eps)`` of the last gradient g.

    For constant gradients this is exact with SGD without momentum and with Adam, and with momentum
    once the momentum has converged (``Rollout`` is exact before, too). An optimizer of
    ``pyparallel.optim`` writes the prediction in the pass that steps it; after any other it takes a
    second pass over weights and state.

    If the last gradient is needed, it is kept in the optimizer's state, which takes one more copy
    of the weights' size.

    Args:
        rule: predicts the steps of any other optimizer; None: the optimizer's own ``displacement``
            method, or the rules above.
    """

    rule: PredictsStep | None = None

    def __repr__(self) -> str:
        # Ranks compare their arguments by it: it must not hold the address of an object.
        return f"Displacement({'' if self.rule is None else type(self.rule).__name__ + '()'})"

    @override
    def attach(self, optimizer: Optimizer, weights: Sequence[FlatBuckets]) -> WeightPredictor:
        if self.rule is not None:
            return _PerParameterPredictor(optimizer, weights, self.rule)
        if isinstance(optimizer, PredictsStep):
            return _PerParameterPredictor(optimizer, weights, optimizer)
        if isinstance(optimizer, FusedOptimizer):
            return FusedPredictor(optimizer)
        return FlatWeightPredictor(optimizer, weights, _rule_of(optimizer))


def _rule_of(optimizer: Optimizer) -> FlatRule:
    """Return the rule of exactly torch's own classes: a subclass may step in another way."""
    kind = type(optimizer)
    if kind is SGD:
        return SGDRule()
    if kind in (Adam, AdamW):
        return AdamRule()
    if kind is RMSprop:
        return RMSpropRule()
    raise ValueError(
        "optimizer must, for a schedule that predicts weights, be of pyparallel.optim, or torch's "
        "SGD, Adam, AdamW or RMSprop, or have a method displacement(parameter, state, group, "
        f"horizon), got {kind.__module__}.{kind.__qualname__}; add the method, or pass an object "
        "that has it as Displacement(rule)"
    )


class _PerParameterPredictor(WeightPredictor):
    def __init__(
        self, optimizer: Optimizer, weights: Sequence[FlatBuckets], rule: PredictsStep
    ) -> None:
        self._optimizer = optimizer
        self._weights = weights
        self._rule = rule

    @override
    def step(self, horizon: int = 0, out: Sequence[Tensor] = ()) -> None:
        self._optimizer.step()
        if horizon:
            self.predict(horizon, out)

    @override
    @torch.no_grad()
    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        """Predict each parameter; copy those without optimizer state."""
        rest = iter(out)
        for group, weights in zip(self._optimizer.param_groups, self._weights, strict=True):
            outputs = [next(rest).copy_(buffer) for buffer in weights.buffers]
            for parameter, view in zip(weights.parameters, weights.views(outputs), strict=True):
                state = self._optimizer.state.get(parameter)
                if state:
                    view.copy_(parameter + self._displacement(parameter, state, group, horizon))

    def _displacement(
        self, parameter: nn.Parameter, state: Mapping[str, Any], group: Group, horizon: int
    ) -> Tensor:
        displacement = self._rule.displacement(parameter, state, group, horizon)
        if displacement.shape != parameter.shape:
            raise ValueError(
                f"{type(self._rule).__name__}.displacement must return a tensor of the parameter's "
                f"shape {list(parameter.shape)}, got {list(displacement.shape)}"
            )
        return displacement
