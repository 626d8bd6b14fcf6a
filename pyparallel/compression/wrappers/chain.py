"""A message made smaller once more."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...comm.collectives import Collectives
from ..compressor import AttachPoint, Message
from ..layout import BufferLayout
from ..quantizers.blockwise import BlockwiseCompressor
from ..sparsifiers.all_gather import AllGatherCompressor
from ..sparsifiers.base import Sparsifier
from ..sparsifiers.permutation_sketch import PermutationSketch
from ..sparsifiers.random_k import RandomK
from ..state import CompressorState
from ..validation import CorruptMessageError, refusing_corrupt


@dataclass(frozen=True)
class Chain(AllGatherCompressor):
    """The first chooses entries, the second says their values: ``Chain(TopK(0.01), Int8())``.

    A message is the second's of the values, then what says where they belong. A residual is what
    both lose together (Basu et al., NeurIPS 2019, arXiv 1906.02367, with error feedback). A mean
    gathers all messages; where the first is `RandomK`, it is the second's mean of the values.

    Args:
        first: what sends some entries as they are: `TopK`, `RandomK`, `Threshold`, `PermK`.
        second: what encodes runs of neighbors on their own: `Cast`, `Int8` and their like.
    """

    first: Sparsifier
    second: BlockwiseCompressor

    def __post_init__(self) -> None:
        if not isinstance(self.first, Sparsifier):
            raise ValueError(
                f"first must send some of the entries, as TopK does, got {self.first!r}; "
                "ErrorFeedback goes around a Chain"
            )
        if not isinstance(self.second, BlockwiseCompressor):
            raise ValueError(
                f"second must encode values by blocks, as Int8 does, got {self.second!r}"
            )

    @property
    def unbiased(self) -> bool:
        """Where both are."""
        return self.first.unbiased and self.second.unbiased

    @property
    def fixed_length(self) -> bool:
        """Where both are."""
        return self.first.fixed_length and self.second.fixed_length

    @property
    def takes_residual(self) -> bool:
        """Where the first does."""
        return self.first.takes_residual

    def validation_error(self, place: AttachPoint) -> str | None:
        """What is the first's or the second's."""
        return self.first.validation_error(place) or self.second.validation_error(place)

    def contraction(self, layout: BufferLayout) -> float | None:
        """The product: the second loses a part of what the first sends, which is orthogonal."""
        kept = self.first.contraction(layout)
        if kept is None:
            return None
        of_values = self.second.contraction(BufferLayout.flat(round(kept * layout.numel)))
        return None if of_values is None else kept * of_values

    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        """With what the first remembers."""
        return CompressorState(layout, rank, inner=[self.first.init(layout, device, rank)])

    def compress(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None
    ) -> Message:
        """As `Compressor.compress`: (*the second's of the values, *the rest of the first's)."""
        values, *where = self._choose(x, state, residual)
        lost = None if residual is None else torch.zeros_like(values, dtype=torch.float32)
        message = self.second.compress(values, self._state_of(values, state), lost)
        self._update_residual(residual, lost, tuple(where), state.layout)
        return (*message, *where)

    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        """As `Compressor.decompress`."""
        num_tensors = len(self.second.sizes(0))
        where = message[num_tensors:]
        with refusing_corrupt():
            num_values = self.first.num_values(where, layout)
        sizes = tuple(each.numel() for each in message[:num_tensors])
        if sizes != self.second.sizes(num_values):
            raise CorruptMessageError(f"got tensors of {sizes} entries for {num_values} values")
        values = torch.empty(num_values, dtype=torch.float32, device=out.device)
        self.second.decompress(message[:num_tensors], BufferLayout.flat(num_values), values)
        return self.first.decompress((values, *where), layout, out, accumulate=accumulate)

    def mean_(
        self,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Tensor | None = None,
    ) -> None:
        """As `Compressor.mean_`."""
        if isinstance(self.first, RandomK):
            self._mean_of_values_(self.first, x, state, collectives, residual)
        elif isinstance(self.first, PermutationSketch):
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
        residual: Tensor | None,
    ) -> None:
        """All ranks have drawn the same entries: their values are a buffer of their own."""
        with collectives.stats.encoding():
            values, *where = self._choose(x, state, residual)
            values = values.float()
        lost = None if residual is None else torch.zeros_like(values)
        self.second.mean_(values, self._state_of(values, state), collectives, lost)
        with collectives.stats.decoding():
            self._update_residual(residual, lost, tuple(where), state.layout)
            first.decompress((values, *where), state.layout, x)

    def _choose(self, x: Tensor, state: CompressorState, residual: Tensor | None) -> Message:
        """The first's message; both draw by the steps of the whole."""
        state.inner[0].step = state.step
        state.step += 1
        return self.first.compress(x, state.inner[0], residual)

    def _state_of(self, values: Tensor, state: CompressorState) -> CompressorState:
        """The second's, of as many values as there are now: it remembers nothing but the step."""
        names = state.layout.names
        layout = BufferLayout.flat(values.numel(), f"values of {names[0] if names else 'nothing'}")
        of_values = self.second.init(layout, values.device, state.rank)
        of_values.step = state.step
        return of_values

    def _update_residual(
        self, residual: Tensor | None, lost: Tensor | None, where: Message, layout: BufferLayout
    ) -> None:
        if residual is not None and lost is not None:
            self.first.decompress((lost, *where), layout, residual, accumulate=True)
