"""Weight prediction by the optimizer's own rule: its last step, repeated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Muon, NAdam, Optimizer, RMSprop
from typing_extensions import override

from ...optim import FusedOptimizer
from ...training import FlatBuckets
from ...training.arguments import require
from .base import Prediction, WeightPredictor
from .flat_predictor import FlatRule, FlatWeightPredictor, FusedPredictor, Group
from .last_update import LastUpdatePredictor
from .optimizer_rules import AdamRule, NAdamRule, RMSpropRule, SGDRule

# Of other packages, by name: their step is the sign of the interpolated momentum.
_LIONS = "lion_pytorch.lion_pytorch.Lion", "timm.optim.lion.Lion"


@runtime_checkable
class PredictsStep(Protocol):
    """Protocol of an optimizer, or of an object beside it, that predicts the optimizer's steps."""

    def displacement(
        self, parameter: nn.Parameter, state: Mapping[str, Any], group: Group, horizon: int
    ) -> Tensor:
        """Return what the next ``horizon`` steps will add to a parameter, in its shape.

        ``state`` is the optimizer's of it, never empty; ``group`` has the rate of the next steps.
        Nothing is changed.
        """


@dataclass(frozen=True, repr=False)
class Displacement(Prediction):
    """PipeOptim's prediction: the last step is repeated (Guan et al., arXiv 2312.00839).

    Predicts ``weights - lr * horizon * D``, where D is, for torch's optimizers,

    * SGD: the momentum buffer (SpecTrain's rule), or the last gradient without momentum;
    * Adam, AdamW: ``m_hat / (sqrt(v_hat) + eps)``; decoupled weight decay is not predicted;
    * NAdam: the same, times the factors of its momentum schedule in the next steps;
    * RMSprop: the momentum buffer, or ``g / (sqrt(v) + eps)`` of the last gradient g.

    ``torch.optim.Muon``, and Lion of lion-pytorch and timm, are predicted by ``LastUpdate``.

    For constant gradients this is exact with SGD without momentum, Adam, NAdam, and Muon and Lion
    without weight decay, and with momentum once the momentum has converged (``Rollout`` is exact
    before, too). The rate is that of the next update, a scheduler's. An optimizer of
    ``pyparallel.optim`` writes the prediction in the pass that steps it, unless schedulers, hooks
    or replicas act after it; after any other it takes a second pass over weights and state.

    If the last gradient or update is needed, it is kept in the optimizer's state, which takes one
    more copy of the weights' size.

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
        kind = type(optimizer)
        if kind is Muon or f"{kind.__module__}.{kind.__qualname__}" in _LIONS:
            return LastUpdatePredictor(optimizer, weights)
        return FlatWeightPredictor(optimizer, weights, _rule_of(optimizer))


# Of exactly torch's own classes: a subclass may step in another way.
_RULES: dict[type[Optimizer], FlatRule] = {
    SGD: SGDRule(),
    Adam: AdamRule(),
    AdamW: AdamRule(),
    NAdam: NAdamRule(),
    RMSprop: RMSpropRule(),
}


def _rule_of(optimizer: Optimizer) -> FlatRule:
    kind = type(optimizer)
    if kind in _RULES:
        return _RULES[kind]
    raise ValueError(
        "optimizer must, for a schedule that predicts weights, be of pyparallel.optim, or torch's "
        "SGD, Adam, AdamW, NAdam, RMSprop or Muon, or Lion of lion-pytorch or timm, or have a "
        "method displacement(parameter, state, group, horizon), got "
        f"{kind.__module__}.{kind.__qualname__}; add the method, pass an object that has it as "
        "prediction=Displacement(rule), or pass prediction=LastUpdate(), which repeats the last "
        "update of any optimizer"
    )


@dataclass(eq=False)
class _PerParameterPredictor(WeightPredictor):
    _optimizer: Optimizer
    _weights: Sequence[FlatBuckets]
    _rule: PredictsStep

    @override
    def step(self, horizon: int = 0, out: Sequence[Tensor] = (), delayed: bool = True) -> None:
        self._optimizer.step()
        if horizon:
            self.predict(horizon, out)

    @override
    @torch.no_grad()
    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
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
        shape, name = list(parameter.shape), type(self._rule).__name__
        rule = f"{name}.displacement must return a tensor of the parameter's shape {shape}"
        require(displacement.shape == parameter.shape, rule, str(list(displacement.shape)))
        return displacement
