"""Adam and AdamW, fused."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from ..ops.adamw_step import adamw_step_unchecked
from ..ops.predict_adam import predict_adam_unchecked
from .bucket import STEP, Bucket, Gradients, Span
from .fused_optimizer import FusedOptimizer, Group, as_double, part
from .validation import check_numbers

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Adam(FusedOptimizer):
    """Adam (Kingma & Ba, arXiv 1412.6980), a drop-in for ``torch.optim.Adam``.

    Arguments, defaults, parameter groups, state dicts and results are torch's; ``ops.adamw_step_``
    documents the rounding.

    Args:
        params: parameters, or groups of them, of float32, bfloat16 or float16.
        lr: learning rate, at least 0; a tensor is not read on the host.
        betas: decays of the two moments, in [0, 1).
        eps: added to the denominator, at least 0.
        weight_decay: L2 penalty, at least 0.
        amsgrad, differentiable: must be False.
        foreach: accepted without effect, the step is always fused.
        capturable: keep step counts on the parameters' device, for CUDA graphs.
        fused: as ``foreach``; True also keeps step counts on the parameters' device.
        decoupled_weight_decay: decay the parameters instead of adding a penalty, as AdamW.
        master_weights: step 16-bit parameters in float32 copies, with all state in float32, and
            write them rounded in the same pass; as in apex. Other parameters have no copies.

    Raises:
        ValueError: an argument is out of range, or needs ``torch.optim.Adam``.
        RuntimeError: both ``foreach`` and ``fused`` are True.
    """

    _options_of_newer_torch = FusedOptimizer._options_of_newer_torch | {
        "amsgrad": False,
        "capturable": False,
        "decoupled_weight_decay": False,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        master_weights: bool = False,
    ) -> None:
        check_numbers({"lr": lr, "eps": eps, "weight_decay": weight_decay})
        for index, beta in enumerate(betas):
            check_numbers({f"betas[{index}]": beta})
            if not beta < 1:
                raise ValueError(f"betas[{index}] must be below 1, got {beta}")
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
                "foreach": foreach,
                "capturable": capturable,
                "differentiable": differentiable,
                "fused": fused,
                "decoupled_weight_decay": decoupled_weight_decay,
            },
            master_weights=master_weights,
        )

    @override
    def _begin_step(self, bucket: Bucket, group: Group, num_gradients: int) -> Sequence[Span]:
        bucket.state(*_MOMENTS, STEP)
        bucket.count_step()
        if not all(map(bucket.has_all, (*_MOMENTS, STEP))):
            bucket.publish(*_MOMENTS, STEP)
        return bucket.spans()

    @override
    def _step_span(
        self, bucket: Bucket, group: Group, span: Span, gradients: Gradients, rest: tuple[Any, ...]
    ) -> None:
        mean, square = map(bucket.flat, _MOMENTS)
        beta1, beta2 = group["betas"]
        adamw_step_unchecked(
            part(bucket.stepped, span),
            *gradients,
            part(mean, span),
            part(square, span),
            as_double(group["lr"]),
            float(beta1),
            float(beta2),
            float(group["eps"]),
            float(group["weight_decay"]),
            bucket.step_count(span),
            group["decoupled_weight_decay"],
            group["maximize"],
            *rest,
        )

    @property
    @override
    def skips_on_device(self) -> bool:
        return all(group["capturable"] or group.get("fused") for group in self.param_groups)

    @override
    def _end_step(self, bucket: Bucket, group: Group, found_inf: Tensor | None) -> None:
        if found_inf is not None:
            bucket.count_step(found_inf)

    @override
    def _predict(self, bucket: Bucket, group: Group, horizon: Tensor, out: Tensor) -> None:
        mean, square, counts = bucket.state(*_MOMENTS, STEP)
        beta1, beta2 = map(float, group["betas"])
        for span in bucket.spans():
            if not bucket.has(STEP, span.first):
                part(out, span).copy_(part(bucket.stepped, span))
                continue
            predict_adam_unchecked(
                part(bucket.stepped, span),
                part(mean, span),
                part(square, span),
                as_double(group["lr"]),
                beta1,
                beta2,
                group["eps"],
                as_double(counts[span.first]),
                horizon,
                part(out, span),
            )


class AdamW(Adam):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101), a drop-in for ``torch.optim.AdamW``.

    Arguments are those of `Adam`, but the parameters are multiplied by ``1 - lr * weight_decay`` in
    each step.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            master_weights=master_weights,
        )

    @override
    def _set_missing_options(self, group: Group) -> None:
        group["decoupled_weight_decay"] = True  # also if Adam has saved the group, as in torch
        super()._set_missing_options(group)
