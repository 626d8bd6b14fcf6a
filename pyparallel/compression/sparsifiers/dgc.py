"""Deep Gradient Compression: top-k with momentum correction and masking."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ... import ops
from ...comm.collectives import Collectives
from ...training.arguments import check_in, check_integer
from ..compressor import AttachPoint, Compressor, Message, all_but
from ..layout import BufferLayout
from ..residual import RESIDUAL, Residual, check_no_residual, clear_non_finite
from ..state import CompressorState
from .base import add_at_indices
from .top_k import count_of

MOMENTUM = "momentum"
_STAGES = 4  # of the warm-up; epochs in the paper


@dataclass(frozen=True)
class DGC(Compressor):
    """Deep Gradient Compression (Lin et al., ICLR 2018, arXiv 1712.01887): momentum before top-k.

    Every rank keeps ``u = momentum * u + gradient`` and ``v += u``; the largest entries of v are
    sent and reset to 0 (momentum correction). The mean is thus the update of SGD with momentum, so
    the optimizer must be plain ``torch.optim.SGD`` with ``momentum=0``, or momentum is applied
    twice; its weight decay is not accumulated in the momentum.

    It has error feedback of its own and costs 8 bytes an entry, of float32. A message takes 8 bytes
    per entry sent: values as float32 and indices. A nan or an inf is sent and reset to 0 in u and
    v.

    Args:
        density: fraction of a buffer's entries that are sent, in (0, 1]; at least one entry of a
            buffer that is not empty.
        momentum: in [0, 1).
        warm_up: number of steps in which the density falls to its value, in four equal stages: for
            0.001 these are 0.25, 0.063, 0.016 and 0.004.
        clip_norm: maximum Euclidean norm of each parameter's gradient in the mean over ranks; each
            rank's gradient is clipped to ``clip_norm / sqrt(ranks)`` before it is accumulated. A
            gradient with a nan or an inf is not clipped. None: do not clip.
        nesterov: send the update of SGD's ``nesterov=True``: ``v += gradient + momentum * u``.
        masking: set u to 0 where an entry was sent, so that stale gradients do not continue in the
            momentum (momentum factor masking). With density 1 no momentum is left.
    """

    density: float = 0.001
    momentum: float = 0.9
    warm_up: int = 0
    clip_norm: float | None = None
    nesterov: bool = False
    masking: bool = True
    feeds_back = True  # v is the residual

    def __post_init__(self) -> None:
        check_in("density", self.density, "(0, 1]")
        check_in("momentum", self.momentum, "[0, 1)")
        check_integer("warm_up", self.warm_up, 0)
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise ValueError(f"clip_norm must be finite and > 0, or None, got {self.clip_norm!r}")

    @property
    @override
    def fixed_length(self) -> bool:
        return self.warm_up == 0

    @property
    @override
    def refusals(self) -> Mapping[AttachPoint, str]:
        found = dict.fromkeys(
            all_but(AttachPoint.DDP, AttachPoint.FSDP_GRADIENTS),
            "compressor must not accumulate momentum for {place}, which are not parameter "
            "gradients; got {self}, use TopK({self.density!r})",
        )
        if self.clip_norm is not None:
            found[AttachPoint.FSDP_GRADIENTS] = (
                "clip_norm must be None for {place}, which shards parameters, got "
                "{self.clip_norm!r}; clip in the training loop"
            )
        return found

    def density_at(self, step: int) -> float:
        """Return the density of the message at a step, counted from 0."""
        if step >= self.warm_up:
            return self.density
        stage = _STAGES * step // self.warm_up
        return float(self.density ** ((stage + 1) / (_STAGES + 1)))

    @override
    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        zeros = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        threshold = torch.zeros((), dtype=torch.float32, device=device)
        entries = {MOMENTUM: zeros, RESIDUAL: zeros.clone()}
        return CompressorState(layout, rank, entries=entries, hints={"threshold": threshold})

    @override
    def compress(self, x: Tensor, state: CompressorState, residual: Residual = None) -> Message:
        """Return (values, indices); the residual is the compressor's own.

        It does not clip: ``mean_`` does, which has the number of ranks.
        """
        check_no_residual(residual)
        density = self.density_at(state.step)
        state.begin_message(x)
        count = count_of(density, x.numel())
        u, v = state.entries[MOMENTUM], state.entries[RESIDUAL]
        u.mul_(self.momentum).add_(x)
        update = u.mul(self.momentum).add_(x) if self.nesterov else u
        values, indices = ops.top_k(update, count, residual=v, threshold=state.hints["threshold"])
        clear_non_finite(u, values)
        if self.masking:
            u.index_fill_(0, indices.long(), 0)
        return values, indices

    @override
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        return add_at_indices(message, out, accumulate)

    @override
    def mean_(
        self, x: Tensor, state: CompressorState, collectives: Collectives, residual: Residual = None
    ) -> None:
        """Clip, then average; the residual is the compressor's own."""
        if self.clip_norm is not None:
            state.layout.check(x)
            limit = self.clip_norm / math.sqrt(collectives.size)
            for gradient in state.layout.split(x):
                norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
                gradient.mul_(torch.where(norm.isfinite(), limit / norm.clamp_min(limit), 1))
        super().mean_(x, state, collectives, residual)
