"""Random-K: entries chosen by a seed, so that no indices are sent."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ... import ops
from ...comm.collectives import Collectives
from ...training.arguments import check_in, check_integer
from ..compressor import Message
from ..corrupt_messages import refusing_corrupt
from ..layout import BufferLayout
from ..residual import Residual
from ..state import CompressorState
from .base import Sparsifier, check_numbers, check_values, propagate_nonfinite_
from .top_k import count_of


@dataclass(frozen=True)
class RandomK(Sparsifier):
    """Random entries, the same on all ranks and redrawn for every message.

    Without a residual they are scaled by ``numel / k``, which is unbiased (Wangni et al., NeurIPS
    2018, arXiv 1710.09854); with one they are not, since entries not sent now are sent later (Stich
    et al., NeurIPS 2018, arXiv 1809.07599). A message is k values in x's dtype and the step of its
    draw; the mean over ranks is an all-reduce of the k values in float32. If any entry of x is nan
    or infinite, all values are nan.

    Args:
        density: fraction of a buffer's entries that are sent, in (0, 1]; at least one entry of a
            buffer that is not empty.
        seed: seed of the random draws, which depend on the step, so ranks must be at the same step.
        run_length: number of neighbors that are drawn together, at least 1; single entries take
            longer. A buffer with too few whole runs is drawn by single entries.
    """

    density: float
    seed: int = 0
    run_length: int = 32
    unbiased = True

    def __post_init__(self) -> None:
        check_in("density", self.density, "(0, 1]")
        check_integer("run_length", self.run_length)

    @override
    def compress(self, x: Tensor, state: CompressorState, residual: Residual = None) -> Message:
        """Return (values, (1,) int64: the step of the draw)."""
        values = self.draw(x, state, residual)
        return values.to(x.dtype), self.number_of_draw(state, x.device)

    @override
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        with refusing_corrupt():
            values, number = message
            check_values(values, self.num_values((number,), layout))
        if not accumulate:
            out.zero_()
        return ops.scatter_add_(out, values, self._indices(layout, number, out.device))

    @override
    def mean_(
        self, x: Tensor, state: CompressorState, collectives: Collectives, residual: Residual = None
    ) -> None:
        with collectives.stats.encoding():
            values = self.draw(x, state, residual)
        collectives.all_reduce_(values)
        with collectives.stats.decoding():
            number = self.number_of_draw(state, x.device)
            self.decompress((values.div_(collectives.size), number), state.layout, x)

    @override
    def num_values(self, where: Message, layout: BufferLayout) -> int:
        (number,) = where
        check_numbers(number, 1)
        return count_of(self.density, layout.numel)

    def draw(self, x: Tensor, state: CompressorState, residual: Residual) -> Tensor:
        """Return the values of the next message, (k,) float32."""
        state.begin_message(x)
        count = count_of(self.density, x.numel())
        values = ops.random_k(
            x,
            count,
            seed=state.seed(self.seed, shared=True),
            offset=state.step,
            residual=residual,
            run_length=self._run_length(x.numel()),
        ).float()
        if residual is None:
            values *= x.numel() / max(1, count)
        else:
            residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return propagate_nonfinite_(values, x)

    def number_of_draw(self, state: CompressorState, device: torch.device) -> Tensor:
        """Return the step of the last draw as a tensor of a message, (1,) int64."""
        return torch.full((1,), state.step, dtype=torch.int64, device=device)

    def _indices(self, layout: BufferLayout, number: Tensor, device: torch.device) -> Tensor:
        return ops.random_k_indices(
            layout.numel,
            count_of(self.density, layout.numel),
            seed=CompressorState(layout).seed(self.seed, shared=True),
            offset=number[0],
            run_length=self._run_length(layout.numel),
            device=device,
        )

    def _run_length(self, numel: int) -> int:
        in_runs = numel // self.run_length * self.run_length
        return self.run_length if count_of(self.density, numel) <= in_runs else 1
