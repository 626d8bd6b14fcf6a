"""Error feedback: the error of a message is added to the next buffer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ...comm.collectives import Collectives
from ...training.arguments import check_in, require
from ..compressor import AttachPoint, Compressor, Message, not_a_compressor
from ..layout import BufferLayout
from ..residual import RESIDUAL, Residual, check_no_residual
from ..state import CompressorState
from .composed import Composed


@dataclass(frozen=True)
class ErrorFeedback(Composed):
    """Error feedback: adds the error of a message to the next buffer.

    For any compressor, the messages of all steps sum to the buffers minus one residual (Seide et
    al., Interspeech 2014; Stich et al., NeurIPS 2018, arXiv 1809.07599; Karimireddy et al., ICML
    2019, arXiv 1901.09847). Costs 4 bytes an entry, of float32.

    Args:
        compressor: any without error feedback of its own.
        decay: what the residual is multiplied by before a buffer is added, in [0, 1]. Below 1
            errors are forgotten, which suits outer steps, far apart in time: 0.95 in SparseLoCo
            (arXiv 2508.15706), 0.9 in MuLoCo (arXiv 2505.23725).
    """

    compressor: Compressor
    decay: float = 1.0
    unbiased = False
    feeds_back = True

    def __post_init__(self) -> None:
        if problem := not_a_compressor(self.compressor):
            raise problem
        rule = "compressor must not have error feedback already"
        require(not self.compressor.feeds_back, rule, str(self.compressor))
        rule = "compressor must take a residual"
        fix = "use PermK(), which does not precondition, or Cast(), which adds in float32"
        require(self.compressor.takes_residual, rule, str(self.compressor), fix)
        check_in("decay", self.decay, "[0, 1]")

    def __repr__(self) -> str:
        decay = f", decay={self.decay!r}" if self.decay != 1 else ""
        return f"ErrorFeedback(compressor={self.compressor!r}{decay})"  # as saved before decays

    @property
    @override
    def parts(self) -> tuple[Compressor, ...]:
        return (self.compressor,)

    @property
    @override
    def finds_nonfinite(self) -> bool:
        return self.compressor.finds_nonfinite

    @property
    @override
    def refusals(self) -> Mapping[AttachPoint, str]:
        rule, fix = "compressor must not have error feedback for {place}: ", "use {self.compressor}"
        unrelated = f"{rule}consecutive messages encode unrelated tensors; got {{self}}, {fix}"
        found = dict.fromkeys((AttachPoint.PIPELINE, AttachPoint.FSDP_PARAMETERS), unrelated)
        included = f"{rule}the next message includes the error already; got {{self}}, {fix}"
        return found | {AttachPoint.GOSSIP: included}

    @override
    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        residual = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        inner = self.compressor.init(layout, device, rank)
        return CompressorState(layout, rank, entries={RESIDUAL: residual}, inner=[inner])

    @override
    def compress(self, x: Tensor, state: CompressorState, residual: Residual = None) -> Message:
        check_no_residual(residual)
        return self.compressor.compress(x, state.inner[0], self._decayed_residual(x, state))

    @override
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        return self.compressor.decompress(message, layout, out, accumulate=accumulate)

    @override
    def mean_(
        self,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Residual = None,
        **drops: bool,
    ) -> Tensor | None:
        check_no_residual(residual)
        residual = self._decayed_residual(x, state)
        mean_: Any = self.compressor.mean_  # takes ``drops`` where this one does
        of_ranks: Tensor | None = mean_(x, state.inner[0], collectives, residual, **drops)
        return of_ranks

    def _decayed_residual(self, x: Tensor, state: CompressorState) -> Tensor:
        """Return the residual to add to x; nothing is written if x is refused."""
        state.layout.check(x)
        residual = state.entries[RESIDUAL]
        return residual.mul_(self.decay) if self.decay != 1 else residual
