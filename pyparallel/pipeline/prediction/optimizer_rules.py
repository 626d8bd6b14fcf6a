"""How torch's optimizers go on, if what they follow does not change."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops import predict_adam, predict_sgd
from .flat_predictor import LAST_GRADIENT, Group


@dataclass(frozen=True)
class SGDRule:
    """``weights - lr * horizon * momentum_buffer``; without momentum, of the last gradient.

    The momentum buffer is as the optimizer keeps it, with weight decay and dampening in it. With
    Nesterov's momentum the same: that is where it settles while gradients stay.
    """

    def entries(self, group: Group) -> tuple[str, ...]:
        """The velocity."""
        return ("momentum_buffer",) if group["momentum"] else (LAST_GRADIENT,)

    def predict(
        self, weights: Tensor, state: Mapping[str, Tensor], group: Group, horizon: int, out: Tensor
    ) -> None:
        """Along the velocity."""
        velocity = state[self.entries(group)[0]]
        predict_sgd(weights, velocity, lr=learning_rate(group), horizon=horizon, out=out)


@dataclass(frozen=True)
class AdamRule:
    """``weights - lr * horizon * m_hat / (sqrt(v_hat) + eps)``; AdamW's decay is left out.

    With ``amsgrad`` v is the greatest so far, as in the optimizer's own step.
    """

    def entries(self, group: Group) -> tuple[str, ...]:
        """Both moments."""
        return "exp_avg", "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"

    def predict(
        self, weights: Tensor, state: Mapping[str, Tensor], group: Group, horizon: int, out: Tensor
    ) -> None:
        """Along the moments, corrected for their bias."""
        if "step" not in state:
            out.copy_(weights)
            return
        mean, square = (state[name] for name in self.entries(group))
        beta1, beta2 = group["betas"]
        numbers = {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "step": state["step"]}
        rate = learning_rate(group)
        predict_adam(weights, mean, square, lr=rate, horizon=horizon, out=out, **numbers)


@dataclass(frozen=True)
class RMSpropRule:
    """``weights - lr * horizon * g / (sqrt(v) + eps)``, or along the momentum buffer with momentum.

    v is ``square_avg``, less the square of ``grad_avg`` with ``centered``; g the last gradient.
    """

    def entries(self, group: Group) -> tuple[str, ...]:
        """The velocity, or what it is made of."""
        if group["momentum"]:
            return ("momentum_buffer",)
        centered = ("grad_avg",) if group["centered"] else ()
        return LAST_GRADIENT, "square_avg", *centered

    def predict(
        self, weights: Tensor, state: Mapping[str, Tensor], group: Group, horizon: int, out: Tensor
    ) -> None:
        """Along the velocity."""
        rate = learning_rate(group)
        if group["momentum"]:
            predict_sgd(weights, state["momentum_buffer"], lr=rate, horizon=horizon, out=out)
            return
        square = state["square_avg"]
        if group["centered"]:
            mean = state["grad_avg"]
            square = torch.addcmul(square, mean, mean, value=-1).clamp_(min=0)
        # Adam without averages of its own.
        numbers = {"beta1": 0.0, "beta2": 0.0, "eps": group["eps"], "step": 1}
        gradient = state[LAST_GRADIENT]
        predict_adam(weights, gradient, square, lr=rate, horizon=horizon, out=out, **numbers)


def learning_rate(group: Group) -> float | Tensor:
    """Of the coming steps: a number, or a tensor that need not be read here."""
    rate: float | Tensor = group["lr"]
    return rate.reshape(()) if isinstance(rate, Tensor) else rate
