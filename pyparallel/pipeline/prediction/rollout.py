"""Weight prediction by the next steps of SGD with momentum, in closed form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from typing_extensions import override

from ...ops import predict_sgd
from ...training import FlatBuckets
from ...training.arguments import require
from .base import Prediction, WeightPredictor
from .flat_predictor import LAST_GRADIENT, FlatRule, FlatWeightPredictor, Group
from .optimizer_rules import learning_rate


@dataclass(frozen=True)
class Rollout(Prediction):
    """The next steps of SGD with momentum, in closed form.

    With momentum u, dampening d and all future gradients assumed to be g, the next momentum buffers
    are ``u^i * m + (1 - d) * (1 + u + ... + u^(i-1)) * g`` for i = 1, 2, .... The prediction is
    ``weights - lr *`` their sum up to the horizon; with Nesterov momentum each step is ``g + u *``
    that. It is exact for constant gradients, where ``Displacement`` is wrong until the momentum has
    converged. Weight decay is that of the last step.

    Only for ``torch.optim.SGD``: with Adam ``Displacement`` is exact for constant gradients.

    Args:
        persistence: g as a multiple of the last gradient, from 0 to 1. With 0 the momentum decays,
            and the last gradient is not kept.
    """

    persistence: float = 1.0

    def __post_init__(self) -> None:
        require(0 <= self.persistence <= 1, "persistence must be from 0 to 1", self.persistence)

    @override
    def attach(self, optimizer: Optimizer, weights: Sequence[FlatBuckets]) -> WeightPredictor:
        rule, got = "optimizer must be torch.optim.SGD for Rollout", type(optimizer).__qualname__
        require(type(optimizer) is SGD, rule, got, "use Displacement()")
        return FlatWeightPredictor(optimizer, weights, _RolloutRule(self.persistence))


@dataclass(frozen=True)
class _RolloutRule(FlatRule):
    persistence: float

    @override
    def state_names(self, group: Group) -> tuple[str, ...]:
        momentum = ("momentum_buffer",) if group["momentum"] else ()
        return (*momentum, LAST_GRADIENT) if self.persistence else momentum

    @override
    def predict(
        self, weights: Tensor, state: Mapping[str, Tensor], group: Group, horizon: int, out: Tensor
    ) -> None:
        momentum_factor, gradient_factor = rollout_coefficients(
            group["momentum"], group["dampening"], group["nesterov"], horizon
        )
        total = torch.zeros_like(weights, dtype=torch.promote_types(weights.dtype, torch.float32))
        if "momentum_buffer" in state:
            total.add_(state["momentum_buffer"], alpha=momentum_factor)
        if LAST_GRADIENT in state:
            total.add_(state[LAST_GRADIENT], alpha=gradient_factor * self.persistence)
        predict_sgd(weights, total, lr=learning_rate(group), horizon=1, out=out)


def rollout_coefficients(
    momentum: float, dampening: float, nesterov: bool, horizon: int
) -> tuple[float, float]:
    """Return the factors of the momentum buffer and of a constant gradient in the steps' sum."""
    if not momentum:
        return 0.0, float(horizon)
    # The next momentum buffer is buffer * m + gradient * g.
    buffer, gradient = 1.0, 0.0
    buffer_sum = gradient_sum = 0.0
    for _ in range(horizon):
        buffer, gradient = momentum * buffer, momentum * gradient + 1 - dampening
        buffer_sum += momentum * buffer if nesterov else buffer
        gradient_sum += 1 + momentum * gradient if nesterov else gradient
    return buffer_sum, gradient_sum
