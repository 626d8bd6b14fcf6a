"""The compressor interface: encode and decode a flat buffer, and average it over ranks."""

import abc
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor

from ..comm.collectives import Collectives
from ..training.arguments import wrong_type
from .corrupt_messages import refusing_corrupt, with_sender
from .layout import BufferLayout
from .residual import Residual, add_residual, update_residual
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


def all_but(*places: AttachPoint) -> list[AttachPoint]:
    """Return the other places."""
    return [each for each in AttachPoint if each not in places]


_OF_UNEVEN_LENGTHS = (
    "compressor must make messages of fixed length for {place}, whose receivers allocate them in "
    "advance, got {self}; use one such as TopK(0.01)"
)


class Compressor(abc.ABC):  # noqa: B024 - subclasses have abstract methods
    """An immutable compressor; its state is passed to each call.

    A new one is a frozen dataclass, as ranks compare its repr, with ``encode`` and ``decode``, or
    with ``compress`` and ``decompress`` where a kernel does more in one pass, and with what differs
    from the defaults here; class attributes may override the properties. Compressors compose:
    ``ErrorFeedback(TopK(0.01))``. One object can be attached in several places; each place keeps
    its own states.
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
    def refusals(self) -> Mapping[AttachPoint, str]:
        """Where it cannot be attached, and the error, a template of ``place`` and ``self``."""
        return {}

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
        text = self.refusals.get(place)
        if text is None and place is AttachPoint.GOSSIP and not self.fixed_length:
            text = _OF_UNEVEN_LENGTHS
        return text and text.format(place=place.value, self=self)

    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        """Return the initial state of a buffer."""
        return CompressorState(layout, rank)

    def encode(self, x: Tensor, state: CompressorState) -> Message:
        """Return the message of a buffer, (numel,) float32, which may have a nan or an inf.

        x is not written. ``state.step``, from 1, and ``state.seed`` are for random draws.
        """
        raise NotImplementedError(f"{type(self).__name__} must define encode or compress")

    def decode(self, message: Message, layout: BufferLayout) -> Tensor:
        """Return what a message of any rank says the buffer is, (numel,) of any float dtype.

        The message is not trusted: any ValueError or RuntimeError here refuses it. A nan or an inf
        of the buffer should show in what is returned.
        """
        raise NotImplementedError(f"{type(self).__name__} must define decode or decompress")

    def compress(self, x: Tensor, state: CompressorState, residual: Residual = None) -> Message:
        """Encode a buffer; here by ``encode``, and the residual by ``decode``.

        Args:
            x: (numel,) float32, bfloat16 or float16, with the layout of the state. Not written.
            residual: (numel,) float32, the error of earlier messages. It is added to x before
                encoding and replaced by the error of this message. Never has a nan or an inf.
                Written.

        Raises:
            ValueError: x cannot be encoded.
        """
        state.begin_message(x)
        total = add_residual(x, residual)
        message = self.encode(total, state)
        if residual is not None:
            update_residual(residual, total, self.decode(message, state.layout))
        return message

    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        """Decode a message of any rank into ``out``, or add it to ``out``; here by ``decode``.

        Args:
            message: a result of ``compress`` for a buffer with this layout. Not trusted.
            out: (numel,) float32, bfloat16 or float16. Written and returned.
            accumulate: add instead of overwriting.

        Raises:
            CorruptMessageError: ``compress`` cannot have made the message. On the CPU nothing has
                been written.
        """
        with refusing_corrupt():
            values = self.decode(message, layout).view(out.shape)
        return out.add_(values) if accumulate else out.copy_(values)

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


def not_a_compressor(
    compressor: object, name: str = "compressor", *, optional: bool = False
) -> TypeError | None:
    """Return the error of an argument that is not a compressor, nor None if ``optional``."""
    if isinstance(compressor, Compressor) or (optional and compressor is None):
        return None
    rule = f"an object such as Int8() or TopK(0.01){', or None' if optional else ''}"
    return wrong_type(name, rule, compressor)


def find_error_at(
    place: AttachPoint, compressor: Compressor, name: str = "compressor"
) -> str | TypeError | None:
    """Return why an argument cannot be attached at a place as a compressor, or None."""
    return not_a_compressor(compressor, name) or compressor.error_at(place)
