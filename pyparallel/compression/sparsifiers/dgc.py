"""The largest entries of what momentum has gathered, and no staleness where they were sent."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import ops
from ...comm.collectives import Collectives
from ..compressor import AttachPoint, Message, check_buffer
from ..layout import BufferLayout
from ..residual import RESIDUAL, clear_non_finite, check_no_residual
from ..state import CompressorState
from .all_gather import AllGatherCompressor
from .top_k import TopK, count_of

MOMENTUM = "momentum"
_STAGES = 4  # of the warm-up, as in the paper, whose stages are epochs


@dataclass(frozen=True)
class DGC(AllGatherCompressor):
    """Deep Gradient Compression (Lin et al., ICLR 2018, arXiv 1712.01887): momentum before top-k.

    Every rank keeps ``u = momentum * u + gradient`` and ``v += u``; the largest entries of v are
    sent and leave 0 there (momentum correction). The mean that comes out is thus what SGD with
    momentum would add to the parameters, so that the optimizer behind it must be plain
    ``torch.optim.SGD`` with ``momentum=0``, or momentum acts twice; its weight decay, if any, goes
    without momentum.

    It feeds back its own errors, and costs 8 bytes an entry, of float32. A message takes 8 bytes an
    entry that it holds: values as float32 and their indices. A nan or an inf is sent and leaves 0
    behind in u and v.

    Args:
        density: the share of a buffer's entries that are sent, in (0, 1]; of a buffer that is not
            empty, at least one.
        momentum: in [0, 1).
        warm_up: steps in which the density falls to its value, in four equal stages: of 0.001
            these are 0.25, 0.063, 0.016 and 0.004.
        clip_norm: what each parameter's gradient may have as its Euclidean norm in the mean over
            ranks; each rank's is scaled down to ``clip_norm / sqrt(ranks)`` before it is added.
            One with a nan or an inf stays as it is. None: do not clip.
        nesterov: send what SGD's ``nesterov=True`` would add: ``v += gradient + momentum * u``.
        masking: put u to 0 where an entry was sent, so that what was late does not go on in a
            direction of the past (momentum factor masking). With density 1 no momentum is left.
    """

    density: float = 0.001
    momentum: float = 0.9
    warm_up: int = 0
    clip_norm: float | None = None
    nesterov: bool = False
    masking: bool = True

    def __post_init__(self) -> None:
        TopK(self.density)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}")
        if self.warm_up < 0:
            raise ValueError(f"warm_up must be a number of steps >= 0, got {self.warm_up!r}")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise ValueError(f"clip_norm must be finite and > 0, or None, got {self.clip_norm!r}")

    @property
    def unbiased(self) -> bool:
        """No: it is right in the long run."""
        return False

    @property
    def fixed_length(self) -> bool:
        """Unless it warms up."""
        return self.warm_up == 0

    @property
    def feeds_back(self) -> bool:
        """Yes: v."""
        return True

    def validation_error(self, place: AttachPoint) -> str | None:
        """It serves gradients alone: only they are what momentum may gather."""
        if place not in (AttachPoint.DDP, AttachPoint.FSDP_GRADIENTS):
            return (
                f"compressor must not gather momentum where it serves {place.value}, which are no "
                f"gradients of parameters; got {self}, use TopK({self.density!r})"
            )
        if place is AttachPoint.FSDP_GRADIENTS and self.clip_norm is not None:
            return (
                f"clip_norm must be None where DGC serves {place.value}, to which parameters come "
                f"in parts, got {self.clip_norm!r}; clip in the training loop"
            )
        return None

    def density_at(self, step: int) -> float:
        """The share that the message after ``step`` others holds."""
        if step >= self.warm_up:
            return self.density
        stage = _STAGES * step // self.warm_up
        return float(self.density ** ((stage + 1) / (_STAGES + 1)))

    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        """With no momentum and nothing lost yet."""
        zeros = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        threshold = torch.zeros((), dtype=torch.float32, device=device)
        entries = {MOMENTUM: zeros, RESIDUAL: zeros.clone()}
        return CompressorState(layout, rank, entries=entries, hints={"threshold": threshold})

    def compress(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None
    ) -> Message:
        """As `Compressor.compress`, with a residual of its own: (values, indices).

        Clips nothing: ``mean_`` does, which knows the number of ranks.
        """
        check_no_residual(residual)
        check_buffer(x, state.layout)
        count = count_of(self.density_at(state.step), x.numel())
        state.step += 1
        u, v = state.entries[MOMENTUM], state.entries[RESIDUAL]
        u.mul_(self.momentum).add_(x)
        update = u.mul(self.momentum).add_(x) if self.nesterov else u
        values, indices = ops.top_k(update, count, residual=v, threshold=state.hints["threshold"])
        for buffer in (u, v):
            clear_non_finite(buffer, values)
        if self.masking:
            u.index_fill_(0, indices.long(), 0)
        return values, indices

    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        """As of `TopK`."""
        return TopK(self.density).decompress(message, layout, out, accumulate=accumulate)

    def mean_(
        self,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Tensor | None = None,
    ) -> None:
        """As `Compressor.mean_`, with a residual of its own."""
        if self.clip_norm is not None:
            check_buffer(x, state.layout)
            _clip_(state.layout.split(x), self.clip_norm / math.sqrt(collectives.size))
        super().mean_(x, state, collectives, residual)


def _clip_(gradients: list[Tensor], limit: float) -> None:
    """Scale each down to a norm, unless its own is not finite: that is for all to see."""
    for gradient in gradients:
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        gradient.mul_(torch.where(norm.isfinite(), limit / norm.clamp_min(limit), 1))
