"""Adam and AdamW, fused."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ..ops.adamw_step import adamw_step_unchecked
from ..ops.predict_adam import predict_adam_unchecked
from .bucket import STEP, Bucket, Gradients, Span
from .fused_optimizer import FusedOptimizer, Group, as_double, part

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Adam(FusedOptimizer, torch.optim.Adam):
    """Adam (Kingma & Ba, arXiv 1412.6980), a drop-in for ``torch.optim.Adam``.

    Arguments, defaults, parameter groups, state dicts and results are torch's; ``ops.adamw_step_``
    documents the rounding. Only these are others:

    Args:
        params: of float32, bfloat16 or float16.
        lr: a tensor is not read on the host.
        amsgrad, differentiable: must be False, or a ValueError names torch's class.
        foreach, fused, capturable: without effect. The step is always fused, and step counts are
            on the parameters' device, as torch's with ``fused=True``.
        master_weights: step 16-bit parameters in float32 copies, with all state in float32, and
            write them rounded in the same pass; as in apex. Other parameters have no copies.
    """

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
        return True

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
                as_double(counts[span.first]).clamp(min=1),  # 0 if all steps were skipped
                horizon,
                part(out, span),
            )


class AdamW(Adam, torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101), a drop-in for ``torch.optim.AdamW``.

    Arguments are those of ``torch.optim.AdamW``, and otherwise as of `Adam`: the parameters are
    multiplied by ``1 - lr * weight_decay`` in each step.
    """
