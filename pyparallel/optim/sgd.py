"""SGD, fused."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from ..ops.predict_sgd import predict_sgd_unchecked
from ..ops.sgd_step import sgd_step_unchecked
from .bucket import Bucket, Gradients, Span
from .fused_optimizer import FusedOptimizer, Group, as_double, part
from .validation import check_numbers

_MOMENTUM = "momentum_buffer"
LAST_GRADIENT = "last_gradient"


class SGD(FusedOptimizer):
    """Stochastic gradient descent, a drop-in for ``torch.optim.SGD``.

    Arguments, defaults, parameter groups, state dicts and results are torch's; ``ops.sgd_step_``
    documents the rounding.

    Args:
        params: parameters, or groups of them, of float32, bfloat16 or float16.
        lr: learning rate, at least 0; a tensor is not read on the host.
        momentum: at least 0.
        dampening: of the gradient in the momentum; without effect in a parameter's first step.
        weight_decay: L2 penalty, at least 0.
        nesterov: Nesterov momentum, which needs momentum and no dampening.
        foreach, fused: accepted without effect, the step is always fused.
        differentiable: must be False.
        master_weights: step 16-bit parameters in float32 copies, with all state in float32, and
            write them rounded in the same pass; as in apex. Other parameters have no copies.

    Raises:
        ValueError: an argument is out of range, or needs ``torch.optim.SGD``.
        RuntimeError: both ``foreach`` and ``fused`` are True.
    """

    keeps_last_gradient = False
    """Whether groups without momentum keep their last gradient, with decay, to predict from it."""

    _options_of_newer_torch = FusedOptimizer._options_of_newer_torch | {"nesterov": False}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
    ) -> None:
        check_numbers({"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                "nesterov must be False without momentum or with dampening, got True with "
                f"momentum={momentum} and dampening={dampening}"
            )
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "maximize": maximize,
                "foreach": foreach,
                "differentiable": differentiable,
                "fused": fused,
            },
            master_weights=master_weights,
        )

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
