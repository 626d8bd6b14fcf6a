"""What a compressor is: a way to say a buffer with fewer bytes, and what it remembers of it."""

import abc
from enum import Enum

import torch
from torch import Tensor

from ..comm.collectives import Collectives
from ..ops import FLOAT_DTYPES
from .layout import BufferLayout
from .state import CompressorState

Message = tuple[Tensor, ...]
"""What travels: flat tensors of plain dtypes, which say all that ``decompress`` needs."""


class AttachPoint(Enum):
    """Where compressors serve."""

    DDP = "the gradients of DistributedDataParallel"
    FSDP_GRADIENTS = "the reduce-scatter of FSDP2"
    FSDP_PARAMETERS = "the all-gather of FSDP2"
    GOSSIP = "gossip messages"
    PIPELINE = "pipeline activations and gradients"


class Compressor(abc.ABC):
    """An immutable description: two functions, and a state that is handed to them.

    Compressors compose: ``ErrorFeedback(TopK(0.01))``. One object serves every place it is attached
    to; each place keeps states of its own.
    """

    @property
    @abc.abstractmethod
    def unbiased(self) -> bool:
        """Whether the expectation of what is decoded is what was encoded."""

    @property
    def fixed_length(self) -> bool:
        """Whether a message's lengths depend on the layout alone."""
        return True

    @property
    def feeds_back(self) -> bool:
        """Whether it sends later what its messages lose, without an ``ErrorFeedback`` around it."""
        return False

    @property
    def takes_residual(self) -> bool:
        """Whether it can be handed what earlier messages lost, as ``ErrorFeedback`` does."""
        return True

    def validation_error(self, place: AttachPoint) -> str | None:
        """Why this compressor cannot serve at a place, as a sentence, or None."""
        return None

    def contraction(self, layout: BufferLayout) -> float | None:
        """Delta in (0, 1] if ``E |x - C(x)|^2 <= (1 - delta) |x|^2`` for all x; None: no such.

        Of what is sent with a residual, where that is another thing than without.
        """
        return None

    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        """The state with which a buffer's first message is made."""
        return CompressorState(layout, rank)

    @abc.abstractmethod
    def compress(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None
    ) -> Message:
        """Encode a buffer.

        Args:
            x: (numel,) float32, bfloat16 or float16, laid out as the state says. Not written.
            state: of this buffer. Written.
            residual: (numel,) float32: what earlier messages lost, which is encoded with x, and
                becomes what this message loses. Never given a nan or an inf. Written.

        Raises:
            ValueError: an x that cannot be encoded.
        """

    @abc.abstractmethod
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        """Decode a message of any rank into ``out``, or add it there.

        Args:
            message: as ``compress`` made it of a buffer so laid out. Not trusted.
            layout: likewise.
            out: (numel,) float32, bfloat16 or float16. Written, and returned.
            accumulate: add instead of overwriting.

        Raises:
            CorruptMessageError: what cannot have come from ``compress``; on the CPU nothing has
                been written.
        """

    @abc.abstractmethod
    def mean_(
        self,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Tensor | None = None,
    ) -> None:
        """Replace x by the mean over ranks of what their messages decode to; all call it together.

        Args:
            x: as for ``compress``; the same length on all ranks. Written.
            state: likewise.
            ranks: who takes part.
            residual: as for ``compress``: the mean over ranks of all residuals is what the means
                so far have lost.

        Raises:
            CorruptMessageError: on every rank, naming the rank whose message it was.
        """


def not_a_compressor(compressor: object) -> str | None:
    """What is wrong with what should be a compressor and is none, as a sentence, or None."""
    if isinstance(compressor, Compressor):
        return None
    return f"compressor must be an object such as Int8() or TopK(0.01), got {compressor!r}"


def validation_error_at(place: AttachPoint, compressor: Compressor) -> str | None:
    """Why this cannot serve at a place, be it a compressor or not, as a sentence, or None."""
    return not_a_compressor(compressor) or compressor.validation_error(place)


def check_buffer(x: Tensor, layout: BufferLayout) -> None:
    """Refuse a buffer that no compressor can read."""
    if x.layout is not torch.strided:
        raise ValueError(
            f"gradients must be dense, got sparse ones of {', '.join(layout.names[:3])}; "
            "Embedding(sparse=False) makes dense ones"
        )
    if x.dim() != 1 or not x.is_contiguous() or x.numel() != layout.numel:
        raise ValueError(
            f"x must be a contiguous buffer of {layout.numel} entries, got shape {list(x.shape)} "
            f"and strides {list(x.stride())}"
        )
    if x.dtype not in FLOAT_DTYPES:
        raise ValueError(
            "compression serves float32, bfloat16 and float16 only, got "
            f"{x.dtype} (parameters {', '.join(layout.names[:3])})"
        )
