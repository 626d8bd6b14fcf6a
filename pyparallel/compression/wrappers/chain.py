"""A sparsifier followed by a quantizer of its values."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from ...comm.collectives import Collectives
from ...training.arguments import require, summarize
from ..compressor import Compressor, Message
from ..corrupt_messages import CorruptMessageError, refusing_corrupt, with_sender
from ..layout import BufferLayout
from ..quantizers.blockwise import BlockwiseCompressor
from ..residual import Residual
from ..sparsifiers.base import Sparsifier
from ..sparsifiers.perm_k import PermK
from ..sparsifiers.random_k import RandomK
from ..state import CompressorState
from .composed import Composed


@dataclass(frozen=True)
class Chain(Composed):
    """A sparsifier whose values are quantized: ``Chain(TopK(0.01), Int8())``.

    A message holds the quantized values, then the sparsifier's other tensors, such as indices. The
    residual is the combined error (Basu et al., NeurIPS 2019, arXiv 1906.02367, with error
    feedback). A mean gathers all messages; with `RandomK` all ranks select the same entries, so
    the quantizer averages the values alone.

    Args:
        first: the sparsifier: `TopK`, `ChunkTopK`, `RandomK`, `Threshold`, `PermK`.
        second: the blockwise compressor of the values, such as `Cast` or `Int8`.
    """

    first: Sparsifier
    second: BlockwiseCompressor

    def __post_init__(self) -> None:
        rule = "first must be a sparsifier such as TopK"
        fix = "wrap the Chain, not its parts, in ErrorFeedback"
        require(isinstance(self.first, Sparsifier), rule, summarize(self.first), fix)
        rule = "second must be a blockwise compressor such as Int8"
        require(isinstance(self.second, BlockwiseCompressor), rule, summarize(self.second))

    @property
    @override
    def parts(self) -> tuple[Compressor, ...]:
        return self.first, self.second

    @override
    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        return CompressorState(layout, rank, inner=[self.first.init(layout, device, rank)])

    @override
    def compress(self, x: Tensor, state: CompressorState, residual: Residual = None) -> Message:
        """Return the second's message of the values, then the first's other tensors."""
        values, *where = self._choose(x, state, residual)
        lost = None if residual is None else torch.zeros_like(values, dtype=torch.float32)
        message = self.second.compress(values, self._state_of(values, state), lost)
        self._update_residual(residual, lost, tuple(where), state.layout)
        return (*message, *where)

    @override
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        decoded = self._decode_values(message, layout, out.device)
        return self.first.decompress(decoded, layout, out, accumulate=accumulate)

    def _decode_values(
        self, message: Message, layout: BufferLayout, device: torch.device
    ) -> Message:
        """Return the first's message, of values that the second decodes."""
        num_tensors = len(self.second.sizes(0))
        where = message[num_tensors:]
        with refusing_corrupt():
            num_values = self.first.num_values(where, layout)
        sizes = tuple(each.numel() for each in message[:num_tensors])
        if sizes != self.second.sizes(num_values):
            raise CorruptMessageError(
                f"sizes must fit {num_values} values, got tensors of {sizes} entries"
            )
        values = torch.empty(num_values, dtype=torch.float32, device=device)
        self.second.decompress(message[:num_tensors], BufferLayout.flat(num_values), values)
        return (values, *where)

    @override
    def _sum_(self, messages: Iterable[Message], layout: BufferLayout, total: Tensor) -> None:
        self.first._sum_(self._decode_each(messages, layout, total.device), layout, total)

    def _decode_each(
        self, messages: Iterable[Message], layout: BufferLayout, device: torch.device
    ) -> Iterator[Message]:
        for sender, each in enumerate(messages):
            with with_sender(sender):
                decoded = self._decode_values(each, layout, device)
            yield decoded

    @override
    def mean_(
        self, x: Tensor, state: CompressorState, collectives: Collectives, residual: Residual = None
    ) -> None:
        if isinstance(self.first, RandomK):
            self._mean_of_values_(self.first, x, state, collectives, residual)
        elif isinstance(self.first, PermK):
            chain = replace(self, first=self.first.for_num_ranks(collectives.size))
            super(Chain, chain).mean_(x, state, collectives, residual)
        else:
            super().mean_(x, state, collectives, residual)

    def _mean_of_values_(
        self,
        first: RandomK,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Residual,
    ) -> None:
        """Average the values as a buffer: all ranks have drawn the same entries."""
        with collectives.stats.encoding():
            values, *where = self._choose(x, state, residual)
            values = values.float()
        lost = None if residual is None else torch.zeros_like(values)
        self.second.mean_(values, self._state_of(values, state), collectives, lost)
        with collectives.stats.decoding():
            self._update_residual(residual, lost, tuple(where), state.layout)
            first.decompress((values, *where), state.layout, x)

    def _choose(self, x: Tensor, state: CompressorState, residual: Residual) -> Message:
        """Return the first's message; both draw by the step of the chain."""
        return self.first.compress(x, state.begin_inner(), residual)

    def _state_of(self, values: Tensor, state: CompressorState) -> CompressorState:
        """Return a fresh state of the second for these values; only the step carries over."""
        names = state.layout.seed_names
        layout = BufferLayout.flat(values.numel(), f"values of {names[0] if names else 'nothing'}")
        return self.second.init(layout, values.device, state.rank).at_step(state.step)

    def _update_residual(
        self, residual: Residual, lost: Residual, where: Message, layout: BufferLayout
    ) -> None:
        if residual is not None and lost is not None:
            self.first.decompress((lost, *where), layout, residual, accumulate=True)
