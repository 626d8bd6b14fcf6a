"""Prediction rules of torch's optimizers, for constant gradients."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ...ops import predict_adam, predict_sgd
from .flat_predictor import LAST_GRADIENT, FlatRule, Group


@dataclass(frozen=True)
class SGDRule(FlatRule):
    """``weights - lr * horizon * momentum_buffer``; without momentum, the last gradient instead.

    The momentum buffer is the optimizer's, weight decay and dampening included. Nesterov momentum
    uses the same rule, which is its limit for constant gradients.
    """

    @override
    def state_names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else (LAST_GRADIENT,)

    @override
    def predict(
        self, weights: Tensor, state: Mapping[str, Tensor], group: Group, horizon: int, out: Tensor
    ) -> None:
        velocity = state[self.state_names(group)[0]]
        predict_sgd(weights, velocity, lr=learning_rate(group), horizon=horizon, out=out)


@dataclass(frozen=True)
class AdamRule(FlatRule):
    """``weights - lr * horizon * m_hat / (sqrt(v_hat) + eps)``; without AdamW's decay.

    With ``amsgrad`` v is the maximum so far, as in the optimizer's own step.
    """

    @override
    def state_names(self, group: Group) -> tuple[str, ...]:
        return "exp_avg", "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"

    @override
    def predict(
        self, weights: Tensor, state: Mapping[str, Tensor], group: Group, horizon: int, out: Tensor
    ) -> None:
        if "step" not in state:
            out.copy_(weights)
            return
        mean, square = (state[name] for name in self.state_names(group))
        beta1, beta2 = group["betas"]
        step = state["step"].clamp(min=1)  # 0 if all steps were skipped on the device
        numbers = {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "step": step}
        rate = learning_rate(group)
        predict_adam(weights, mean, square, lr=rate, horizon=horizon, out=out, **numbers)


@dataclass(frozen=True)
class NAdamRule(FlatRule):
    """Adam's rule with the factors of NAdam's momentum schedule; without decoupled decay.

    With u(t) the momentum of step t and P(t) the product of all up to it, step t subtracts
    ``lr * ((1 - u(t)) / (1 - P(t)) * g + u(t + 1) / (1 - P(t + 1)) * m) / (sqrt(v_hat) + eps)``.
    For constant gradients g is m_hat, and so each of the next steps is a known multiple of Adam's.
    """

    @override
    def state_names(self, group: Group) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq"

    @override
    def predict(
        self, weights: Tensor, state: Mapping[str, Tensor], group: Group, horizon: int, out: Tensor
    ) -> None:
        if "step" not in state:
            out.copy_(weights)
            return
        beta1, beta2 = group["betas"]
        # On a GPU the host does not read them.
        step, product = (
            float(each) if each.is_cpu else each for each in (state["step"], state["mu_product"])
        )
        factor = nadam_factor(beta1, group["momentum_decay"], step, product, horizon)
        numbers = {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "step": state["step"]}
        rate = learning_rate(group) * (factor / horizon)
        moments = state["exp_avg"], state["exp_avg_sq"]
        predict_adam(weights, *moments, lr=rate, horizon=horizon, out=out, **numbers)


def nadam_factor(
    beta1: float, momentum_decay: float, step: float | Tensor, product: float | Tensor, horizon: int
) -> float | Tensor:
    """Return the sum of NAdam's next steps for constant gradients, in steps of Adam.

    ``step`` have been taken, and ``product`` is that of their momenta.
    """

    def momentum(count: float | Tensor) -> Any:
        return beta1 * (1 - 0.5 * 0.96 ** (count * momentum_decay))

    total: float | Tensor = 0.0
    now = momentum(step + 1)
    for count in range(1, horizon + 1):
        product = product * now
        after = momentum(step + count + 1)
        mean = 1 - beta1 ** (step + count)  # m of a gradient that is 1
        total += (1 - now) / (1 - product) + after / (1 - product * after) * mean
        now = after
    return total


@dataclass(frozen=True)
class RMSpropRule(FlatRule):
    """``weights - lr * horizon * g / (sqrt(v) + eps)``; with momentum, as ``SGDRule``.

    v is ``square_avg``, with ``centered`` minus the square of ``grad_avg``; g the last gradient.
    """

    @override
    def state_names(self, group: Group) -> tuple[str, ...]:
        if group["momentum"]:
            return ("momentum_buffer",)
        centered = ("grad_avg",) if group["centered"] else ()
        return LAST_GRADIENT, "square_avg", *centered

    @override
    def predict(
        self, weights: Tensor, state: Mapping[str, Tensor], group: Group, horizon: int, out: Tensor
    ) -> None:
        rate = learning_rate(group)
        if group["momentum"]:
            predict_sgd(weights, state["momentum_buffer"], lr=rate, horizon=horizon, out=out)
            return
        square = state["square_avg"]
        if group["centered"]:
            mean = state["grad_avg"]
            square = torch.addcmul(square, mean, mean, value=-1).clamp_(min=0)
        # Adam without moving averages.
        numbers = {"beta1": 0.0, "beta2": 0.0, "eps": group["eps"], "step": 1}
        gradient = state[LAST_GRADIENT]
        predict_adam(weights, gradient, square, lr=rate, horizon=horizon, out=out, **numbers)


def learning_rate(group: Group) -> float | Tensor:
    """Return the learning rate: a float, or a 0-d tensor, which is not read on the host."""
    rate: float | Tensor = group["lr"]
    return rate.reshape(()) if isinstance(rate, Tensor) else rate
