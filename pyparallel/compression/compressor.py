"""The compressor interface: encode and decode a flat buffer, and average it over ranks."""

import abc
from collections.abc import Iterable, Sequence
from enum import Enum

import torch
from torch import Tensor

from ..comm.collectives import Collectives
from ..training.arguments import wrong_type
from .corrupt_messages import with_sender
from .layout import BufferLayout
from .residual import Residual
from .state import CompressorState

Message = tuple[Tensor, ...]
"""What is sent: flat tensors of plain dtypes, with all that ``decompress`` needs."""


class AttachPoint(Enum):
    """Where a compressor is attached."""

    DDP = "the gradients of DistributedDataParallel"
    FSDP_GRADIENTS = "the reduce-scatter of FSDP2"
    FSDP_PARAMETERS = "the all-gather of FSDP2"
    GOSSIP = "gossip messages"
    OUTER_STEPS = "the differences of outer steps"
    PIPELINE = "pipeline activations and gradients"


class Compressor(abc.ABC):
    """An immutable compressor; its state is passed to each call.

    A new one needs ``compress`` and ``decompress``, and what differs from the defaults here; class
    attributes may override the properties. Compressors compose: ``ErrorFeedback(TopK(0.01))``. One
    object can be attached in several places; each place keeps its own states.
    """

    @property
    def unbiased(self) -> bool:
        """Whether the decoded message equals the input in expectation, without a residual."""
        return False

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

    @property
    def finds_nonfinite(self) -> bool:
        """Whether messages show a nan or an inf, and ``mean_`` takes ``drops``, a bool.

        With it, the buffer of a rank with a nan or an inf, not empty, counts as zeros, and no host
        waits. ``mean_`` returns which ranks' buffers these are, (ranks,), on x's device. Their
        residual, of which the encoder has changed what it cannot restore, becomes 0.
        """
        return False

    def error_at(self, place: AttachPoint) -> str | None:
        """Return why this compressor cannot be attached at a place, or None."""
        if place is not AttachPoint.GOSSIP or self.fixed_length:
            return None
        why = "whose receivers allocate them in advance"
        return f"compressor must make messages of fixed length for {place.value}, {why}, got {self}"

    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        """Return the initial state of a buffer."""
        return CompressorState(layout, rank)

    @abc.abstractmethod
    def compress(self, x: Tensor, state: CompressorState, residual: Residual = None) -> Message:
        """Encode a buffer.

        Args:
            x: (numel,) float32, bfloat16 or float16, with the layout of the state. Not written.
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
            out: (numel,) float32, bfloat16 or float16. Written and returned.
            accumulate: add instead of overwriting.

        Raises:
            CorruptMessageError: ``compress`` cannot have made the message. On the CPU nothing has
                been written.
        """

    def mean_(
        self, x: Tensor, state: CompressorState, collectives: Collectives, residual: Residual = None
    ) -> Tensor | None:
        """Replace x by the mean over ranks of the decoded messages. All ranks must call it.

        Here all ranks receive the messages of all, and add them in one order: messages should be
        much smaller than x. Override it for a better way; with ``finds_nonfinite`` it also has
        ``drops``.

        Args:
            x: as for ``compress``; the same length on all ranks. Written.
            residual: as for ``compress``. The mean over ranks of all residuals is the accumulated
                error of the means.

        Raises:
            CorruptMessageError: on every rank, naming the rank that sent the corrupt message.
        """
        with collectives.stats.encoding():
            message = self.compress(x, state, residual)
        if self.fixed_length:
            messages = collectives.all_gather_each(message)
        else:
            messages = collectives.all_gather_uneven(message)
        with collectives.stats.decoding():
            self._add_up_(messages, state.layout, x, divisor=collectives.size)
        return None

    def _add_up_(
        self, messages: Sequence[Message], layout: BufferLayout, x: Tensor, *, divisor: int
    ) -> None:
        """Replace x by the sum of all ranks' messages over ``divisor``."""
        total = x if x.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32)
        self._sum_(messages, layout, total)
        if divisor != 1:
            total.div_(divisor)
        if total is not x:
            x.copy_(total)

    def _sum_(self, messages: Iterable[Message], layout: BufferLayout, total: Tensor) -> None:
        """Replace total, (numel,) float32, by the sum of all ranks' messages, in their order."""
        total.zero_()
        for sender, each in enumerate(messages):
            with with_sender(sender):
                self.decompress(each, layout, total, accumulate=True)


def not_a_compressor(compressor: object, name: str = "compressor") -> TypeError | None:
    """Return the error of an argument that is not a compressor, or None."""
    if isinstance(compressor, Compressor):
        return None
    return wrong_type(name, "an object such as Int8() or TopK(0.01)", compressor)


def find_error_at(
    place: AttachPoint, compressor: Compressor, name: str = "compressor"
) -> str | TypeError | None:
    """Return why an argument cannot be attached at a place as a compressor, or None."""
    return not_a_compressor(compressor, name) or compressor.error_at(place)
