"""Prediction by the optimizer's own rule: it goes on as in its last step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from ...comm import FlatBuckets
from .base import WeightPredictor
from .flat_predictor import FlatRule, FlatWeightPredictor, Group
from .optimizer_rules import AdamRule, RMSpropRule, SGDRule


@runtime_checkable
class PredictsStep(Protocol):
    """What an optimizer needs to be predicted, or an object beside it: this one method."""

    def displacement(
        self, parameter: nn.Parameter, state: Mapping[str, Any], group: Group, horizon: int
    ) -> Tensor:
        """What the next ``horizon`` steps will add to a parameter; changes nothing.

        Args:
            parameter: with its value of now.
            state: what the optimizer keeps of it, never empty.
            group: its parameter group, with the learning rate of the coming steps.
            horizon: at least 1.

        Returns:
            A tensor of the parameter's shape.
        """


@dataclass(frozen=True, repr=False)
class Displacement:
    """Weights go on as in the last step: PipeOptim's prediction (Guan et al., arXiv 2312.00839).

    ``weights - lr * horizon * D``, where D is, with torch's optimizers,

    * SGD: the momentum buffer (SpecTrain's rule), or the last gradient without momentum;
    * Adam, AdamW: ``m_hat / (sqrt(v_hat) + eps)``; decoupled weight decay is not predicted;
    * RMSprop: the momentum buffer, or ``g / (sqrt(v) + eps)`` of the last gradient g.

    While gradients do not change, this is exact for SGD without momentum and for Adam; with
    momentum it is once the momentum has settled (``Rollout`` is exact before, too). It comes after
    the optimizer's own step, in one pass over weights and state; give the optimizer
    ``fused=True``, so that its step takes one pass, too.

    Where the last gradient is needed it is kept in the optimizer's state, in one more copy of the
    weights' size.

    Args:
        rule: predicts any other optimizer; None: its own ``displacement`` method, or as above.
    """

    rule: PredictsStep | None = None

    def __repr__(self) -> str:
        # Ranks compare what they were given by it: no address of an object.
        return f"Displacement({'' if self.rule is None else type(self.rule).__name__ + '()'})"

    def attach(self, optimizer: Optimizer, weights: Sequence[FlatBuckets]) -> WeightPredictor:
        """The rule for one stage.

        Raises:
            ValueError: there is none for this optimizer.
        """
        if self.rule is not None:
            return _ByParameter(optimizer, weights, self.rule)
        if isinstance(optimizer, PredictsStep):
            return _ByParameter(optimizer, weights, optimizer)
        return FlatWeightPredictor(optimizer, weights, _rule_of(optimizer))


def _rule_of(optimizer: Optimizer) -> FlatRule:
    """For exactly torch's own: a subclass may step in another way."""
    kind = type(optimizer)
    if kind is SGD:
        return SGDRule()
    if kind in (Adam, AdamW):
        return AdamRule()
    if kind is RMSprop:
        return RMSpropRule()
    raise ValueError(
        "the optimizer of a schedule that predicts weights must be torch's SGD, Adam, AdamW or "
        f"RMSprop, or have a method displacement(parameter, state, group, horizon), got "
        f"{kind.__module__}.{kind.__qualname__}; add the method, or pass an object that has it as "
        "Displacement(rule)"
    )


class _ByParameter:
    def __init__(
        self, optimizer: Optimizer, weights: Sequence[FlatBuckets], rule: PredictsStep
    ) -> None:
        self._optimizer = optimizer
        self._weights = weights
        self._rule = rule

    def step(self, horizon: int = 0, out: Sequence[Tensor] = ()) -> None:
        """The optimizer's step, and then the prediction if there is a horizon."""
        self._optimizer.step()
        if horizon:
            self.predict(horizon, out)

    @torch.no_grad()
    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        """Parameter by parameter; those without state stay where they are."""
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
