"""Entries that a seed chooses, so that no indices travel."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ... import ops
from ...comm.collectives import Collectives
from ..compressor import Message, check_buffer
from ..layout import BufferLayout
from ..state import CompressorState
from ..validation import refusing_corrupt
from .base import Sparsifier, check_numbers, check_values, propagate_nonfinite_
from .top_k import check_density, count_of


@dataclass(frozen=True)
class RandomK(Sparsifier):
    """Entries at random, the same ones on all ranks, which draw anew for every message.

    Without a residual they are scaled by ``numel / k``, which is unbiased (Wangni et al., NeurIPS
    2018, arXiv 1710.09854); with one they are not, since what is not sent now is sent later (Stich
    et al., NeurIPS 2018, arXiv 1809.07599). A message is k values in x's dtype and the number of
    its draw; the mean over ranks is an all-reduce of the k values in float32. If any entry of x is
    nan or infinite, all of the values are nan, whatever is drawn.

    Args:
        density: the share of a buffer's entries that are sent, in (0, 1]; of a buffer that is not
            empty, at least one.
        seed: of the draws. All ranks have made as many messages of a buffer, and so draw alike.
        run_length: how many neighbors are drawn together, at least 1; single entries take longer.
            A buffer that has too few whole runs is drawn by single entries.
    """

    density: float
    seed: int = 0
    run_length: int = 32

    def __post_init__(self) -> None:
        check_density(self.density)
        check_run_length(self.run_length)

    @property
    def unbiased(self) -> bool:
        """Without a residual."""
        return True

    def contraction(self, layout: BufferLayout) -> float | None:
        """With a residual: the share that is sent."""
        return count_of(self.density, layout.numel) / max(1, layout.numel)

    def compress(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None
    ) -> Message:
        """As `Compressor.compress`: (values, (1,) int64, the draw)."""
        values = self.draw(x, state, residual)
        return values.to(x.dtype), self.number_of_draw(state, x.device)

    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        """As `Compressor.decompress`."""
        with refusing_corrupt():
            values, number = message
            check_values(values, self.num_values((number,), layout))
        if not accumulate:
            out.zero_()
        return ops.scatter_add_(out, values, self._indices(layout, number, out.device))

    def mean_(
        self,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Tensor | None = None,
    ) -> None:
        """As `Compressor.mean_`."""
        with collectives.stats.encoding():
            values = self.draw(x, state, residual)
        collectives.all_reduce_(values)
        with collectives.stats.decoding():
            number = self.number_of_draw(state, x.device)
            self.decompress((values.div_(collectives.size), number), state.layout, x)

    def num_values(self, where: Message, layout: BufferLayout) -> int:
        """As `Sparsifier.num_values`."""
        (number,) = where
        check_numbers(number, 1)
        return count_of(self.density, layout.numel)

    def draw(self, x: Tensor, state: CompressorState, residual: Tensor | None) -> Tensor:
        """The values of the next message, (k,) float32."""
        check_buffer(x, state.layout)
        state.step += 1
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
        """What a message says of the draw it was made with."""
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


def check_run_length(run_length: int) -> None:
    """Refuse what is no number of neighbors."""
    if not isinstance(run_length, int) or run_length < 1:
        raise ValueError(f"run_length must be a whole number from 1 up, got {run_length!r}")
