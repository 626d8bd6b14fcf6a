"""Prediction by the steps that SGD with momentum would take, one after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ...comm import FlatBuckets
from ...ops import predict_sgd
from .base import WeightPredictor
from .flat_predictor import LAST_GRADIENT, FlatWeightPredictor, Group
from .optimizer_rules import learning_rate


@dataclass(frozen=True)
class Rollout:
    """The next steps of SGD with momentum, in closed form.

    With momentum u, dampening d and the gradients to come all taken as g, the next momenta are
    ``u^i * m + (1 - d) * (1 + u + ... + u^(i-1)) * g`` for i = 1, 2, ..., and the prediction is
    ``weights - lr *`` their sum up to the horizon; with Nesterov's momentum each step is
    ``g + u *`` that. While gradients do not change it is exact, where ``Displacement`` is wrong
    until the momentum has settled. Weight decay counts as in the last step.

    Only for ``torch.optim.SGD``: the moments of Adam would also roll, but of those ``Displacement``
    is exact already.

    Args:
        persistence: g as a multiple of the last gradient, from 0 to 1; 0: the momentum runs out,
            and the last gradient need not be kept.
    """

    persistence: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.persistence <= 1:
            raise ValueError(f"persistence must be from 0 to 1, got {self.persistence}")

    def attach(self, optimizer: Optimizer, weights: Sequence[FlatBuckets]) -> WeightPredictor:
        """The rule for one stage.

        Raises:
            ValueError: the optimizer is not SGD.
        """
        if type(optimizer) is not SGD:
            raise ValueError(
                "the optimizer of Rollout must be torch.optim.SGD, got "
                f"{type(optimizer).__qualname__}; take Displacement()"
            )
        return FlatWeightPredictor(optimizer, weights, _RolloutRule(self.persistence))


@dataclass(frozen=True)
class _RolloutRule:
    persistence: float

    def entries(self, group: Group) -> tuple[str, ...]:
        """The velocity and what drives it."""
        momentum = ("momentum_buffer",) if group["momentum"] else ()
        return (*momentum, LAST_GRADIENT) if self.persistence else momentum

    def predict(
        self, weights: Tensor, state: Mapping[str, Tensor], group: Group, horizon: int, out: Tensor
    ) -> None:
        """Along the sum of the next velocities."""
        of_velocity, of_gradient = shares(
            group["momentum"], group["dampening"], group["nesterov"], horizon
        )
        total = torch.zeros_like(weights, dtype=torch.float32)
        if "momentum_buffer" in state:
            total.add_(state["momentum_buffer"], alpha=of_velocity)
        if LAST_GRADIENT in state:
            total.add_(state[LAST_GRADIENT], alpha=of_gradient * self.persistence)
        predict_sgd(weights, total, lr=learning_rate(group), horizon=1, out=out)


def shares(momentum: float, dampening: float, nesterov: bool, horizon: int) -> tuple[float, float]:
    """What the next steps together are, in units of the last velocity and of a gradient that stays.

    Args:
        momentum: the velocity's factor in each step; 0: without.
        dampening: of the gradient as it enters the velocity.
        nesterov: whether steps look ahead.
        horizon: how many steps.
    """
    if not momentum:
        return 0.0, float(horizon)
    carried, fed = 1.0, 0.0
    of_velocity = of_gradient = 0.0
    for _ in range(horizon):
        carried, fed = momentum * carried, momentum * fed + 1 - dampening
        of_velocity += momentum * carried if nesterov else carried
        of_gradient += 1 + momentum * fed if nesterov else fed
    return of_velocity, of_gradient
