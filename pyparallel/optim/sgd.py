"""SGD, fused."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ..ops.predict_sgd import predict_sgd_unchecked
from ..ops.sgd_step import sgd_step_unchecked
from .bucket import Bucket, Gradients, Span
from .fused_optimizer import FusedOptimizer, Group, as_double, part

_MOMENTUM = "momentum_buffer"
LAST_GRADIENT = "last_gradient"


class SGD(FusedOptimizer, torch.optim.SGD):
    """Stochastic gradient descent, a drop-in for ``torch.optim.SGD``.

    Arguments, defaults, parameter groups, state dicts and results are torch's, but as of `Adam`;
    ``ops.sgd_step_`` documents the rounding.
    """

    keeps_last_gradient = False
    """Whether groups without momentum keep their last gradient, with decay, to predict from it."""

    @override
    def _begin_step(self, bucket: Bucket, group: Group, num_gradients: int) -> Sequence[Span]:
        whole = [Span(0, bucket.values.numel(), 0)]
        name = self._state_name(group)
        if name is None:
            return whole
        bucket.state(name)
        if name == LAST_GRADIENT and num_gradients < len(bucket.parameters):
            bucket.clear_without_gradient(name)
        if not group["dampening"] or bucket.has_all(name):
            return whole
        return bucket.split([bucket.has(name, i) for i in range(len(bucket.parameters))])

    @override
    def _step_span(
        self, bucket: Bucket, group: Group, span: Span, gradients: Gradients, rest: tuple[Any, ...]
    ) -> None:
        name, momentum = self._state_name(group), float(group["momentum"])
        # As in torch the first gradient becomes the momentum buffer undamped.
        damped = name == _MOMENTUM and bucket.has(name, span.first)
        sgd_step_unchecked(
            part(bucket.stepped, span),
            *gradients,
            None if name is None else part(bucket.flat(name), span),
            as_double(group["lr"]),
            momentum,
            float(group["dampening"]) if damped else 0.0,
            float(group["weight_decay"]),
            group["nesterov"] and momentum > 0,
            group["maximize"],
            *rest,
        )

    @property
    @override
    def skips_on_device(self) -> bool:
        return not any(group["dampening"] for group in self.param_groups)

    @override
    def _end_step(self, bucket: Bucket, group: Group, found_inf: Tensor | None) -> None:
        name = self._state_name(group)
        if name is None or bucket.has_all(name):
            return
        # After a skipped first step the next gradient is the first, which matters to dampening.
        if found_inf is None or not group["dampening"] or not float(found_inf):
            bucket.publish(name)

    @override
    def _predict(self, bucket: Bucket, group: Group, horizon: Tensor, out: Tensor) -> None:
        name = self._state_name(group)
        if name is None:
            raise RuntimeError(
                "keeps_last_gradient must be True to predict SGD without momentum, got False"
            )
        (velocity,) = bucket.state(name)
        predict_sgd_unchecked(bucket.stepped, velocity, as_double(group["lr"]), horizon, out)

    def _state_name(self, group: Group) -> str | None:
        if group["momentum"]:
            return _MOMENTUM
        return LAST_GRADIENT if self.keeps_last_gradient else None
