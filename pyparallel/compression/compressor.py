"""The compressor interface: encode and decode a flat buffer, and average it over ranks."""

import abc
from enum import Enum

import torch
from torch import Tensor

from ..comm.collectives import Collectives
from ..ops import FLOAT_DTYPES
from .layout import BufferLayout
from .state import CompressorState

Message = tuple[Tensor, ...]
"""What is sent: flat tensors of plain dtypes, with all that ``decompress`` needs."""


class AttachPoint(Enum):
    """Where a compressor is attached."""

    DDP = "the gradients of DistributedDataParallel"
    FSDP_GRADIENTS = "the reduce-scatter of FSDP2"
    FSDP_PARAMETERS = "the all-gather of FSDP2"
    GOSSIP = "gossip messages"
    PIPELINE = "pipeline activations and gradients"


class Compressor(abc.ABC):
    """An immutable compressor; its state is passed to each call.

    Compressors compose: ``ErrorFeedback(TopK(0.01))``. One object can be attached in several
    places; each place keeps its own states.
    """

    @property
    @abc.abstractmethod
    def unbiased(self) -> bool:
        """Whether the decoded message equals the input in expectation."""

    @property
    def fixed_length(self) -> bool:
        """Whether message lengths depend on the layout alone."""
        return True

    @property
    def feeds_back(self) -> bool:
        """Whether it has error feedback without an ``ErrorFeedback`` around it."""
        return False

    @property
    def takes_residual(self) -> bool:
        """Whether ``compress`` accepts a residual, as ``ErrorFeedback`` passes it."""
        return True

    def validation_error(self, place: AttachPoint) -> str | None:
        """Return why this compressor cannot be attached at a place, or None."""
        return None

    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        """Return the initial state of a buffer."""
        return CompressorState(layout, rank)

    @abc.abstractmethod
    def compress(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None
    ) -> Message:
        """Encode a buffer.

        Args:
            x: (numel,) float32, bfloat16 or float16, with the layout of the state. Not written.
            state: state of this buffer. Written.
            residual: (numel,) float32, the error of earlier messages. It is added to x before
                encoding and replaced by the error of this message. Never has a nan or an inf.
                Written.

        Raises:
            ValueError: x cannot be encoded.
        """

    @abc.abstractmethod
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        """Decode a message of any rank into ``out``, or add it to ``out``.

        Args:
            message: a result of ``compress`` for a buffer with this layout. Not trusted.
            layout: layout of the buffer.
            out: (numel,) float32, bfloat16 or float16. Written and returned.
            accumulate: add instead of overwriting.

        Raises:
            CorruptMessageError: ``compress`` cannot have made the message. On the CPU nothing has
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
        """Replace x by the mean over ranks of the decoded messages. All ranks must call it.

        Args:
            x: as for ``compress``; the same length on all ranks. Written.
            state: state of this buffer. Written.
            collectives: the collectives of the process group.
            residual: as for ``compress``. The mean over ranks of all residuals is the accumulated
                error of the means.

        Raises:
            CorruptMessageError: on every rank, naming the rank that sent the corrupt message.
        """


def not_a_compressor(compressor: object) -> str | None:
    """Return an error message if the argument is not a compressor, or None."""
    if isinstance(compressor, Compressor):
        return None
    return f"compressor must be an object such as Int8() or TopK(0.01), got {compressor!r}"


def validation_error_at(place: AttachPoint, compressor: Compressor) -> str | None:
    """Return why an argument cannot be attached at a place as a compressor, or None."""
    return not_a_compressor(compressor) or compressor.validation_error(place)


def check_flat_buffer(x: Tensor, layout: BufferLayout) -> None:
    """Check that x is a dense flat buffer of the layout's length and of a supported dtype."""
    if x.layout is not torch.strided:
        raise ValueError(
            f"gradients must be dense, got sparse ones of {', '.join(layout.names[:3])}; "
            "use Embedding(sparse=False)"
        )
    if x.dim() != 1 or not x.is_contiguous() or x.numel() != layout.numel:
        raise ValueError(
            f"x must be a contiguous buffer of {layout.numel} entries, got shape {list(x.shape)} "
            f"and strides {list(x.stride())}"
        )
    if x.dtype not in FLOAT_DTYPES:
        raise ValueError(
            "compression supports float32, bfloat16 and float16 only, got "
            f"{x.dtype} (parameters {', '.join(layout.names[:3])})"
        )
