"""A reduce-scatter and an all-gather of messages: what each rank says is encoded once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...comm.collectives import Collectives
from ..compressor import Compressor, Message
from ..layout import BufferLayout
from ..quantizers.blockwise import BlockwiseCompressor
from ..state_store import StateStore
from ..validation import CorruptMessageError, naming_the_sender, refuse_together
from ..wrappers.error_feedback import ErrorFeedback


def scatter_sum(x: Tensor, name: str, memory: StateStore, ranks: Collectives) -> Tensor:
    """What the messages of all ranks decode to, added up, in the part of a buffer that is mine.

    What messages lose is remembered by those who made them, for the whole buffer. Block coders
    encode it in one go, others part by part.

    Args:
        x: (ranks * numel,) float32, bfloat16 or float16: part i is for rank i. Not written.
        name: of the buffer, under which it is remembered.
        memory: of all that the buffer's messages need.
        ranks: who takes part.

    Returns:
        (numel,) float32: the sum, taken in float32.

    Raises:
        CorruptMessageError: on every rank, naming the rank whose message it was.
    """
    numel = x.numel() // ranks.size
    if numel == 0:
        return x.float()
    with ranks.meter.encoding():
        parcels = _encode(x, name, memory, ranks.size)
    received = parcels.exchange(ranks, fixed_length=memory.compressor.fixed_length)
    with ranks.meter.decoding():
        total = torch.zeros(parcels.layouts[0].numel, dtype=torch.float32, device=x.device)
        culprit = _add(received, memory.compressor, parcels.layouts[ranks.rank], total)
    if x.device.type == "cpu":  # elsewhere the device stops, and the host does not wait
        refuse_together(culprit, ranks)
    return total[:numel]


def gather(x: Tensor, out: Tensor, name: str, memory: StateStore, ranks: Collectives) -> None:
    """Let all ranks have what the messages of all decode to: the same bits, also of their own.

    Args:
        x: (numel,) float32, bfloat16 or float16; may be this rank's part of ``out``.
        out: (ranks * numel,) likewise, in the order of ranks. Written.
        name: of the buffer, under which it is remembered.
        memory: of all that the buffer's messages need.
        ranks: who takes part.

    Raises:
        CorruptMessageError: on every rank, naming the rank whose message it was.
    """
    if x.numel() == 0:
        return
    layout, compressor = BufferLayout.flat(x.numel(), name), memory.compressor
    with ranks.meter.encoding():
        message = compressor.compress(x, memory.of(layout, x.device))
    if compressor.fixed_length:
        messages = list(zip(*[ranks.all_gather(tensor) for tensor in message], strict=True))
    else:
        messages = ranks.all_gather_uneven(message)
    with ranks.meter.decoding():
        parts = out.view(ranks.size, x.numel())
        for sender, (each, part) in enumerate(zip(messages, parts, strict=True)):
            with naming_the_sender(sender):
                compressor.decompress(each, layout, part)


@dataclass(frozen=True)
class _PackedMessages:
    """Messages for all ranks, joined tensor by tensor, in the order of their receivers.

    Args:
        tensors: each flat.
        sizes: of each tensor, how much of it every receiver gets.
        layouts: of what every receiver's part decodes to.
    """

    tensors: list[Tensor]
    sizes: list[list[int]]
    layouts: list[BufferLayout]

    def exchange(self, ranks: Collectives, *, fixed_length: bool) -> list[Message]:
        """What all ranks have for this one, by sender."""
        expected = [[sizes[ranks.rank]] * ranks.size for sizes in self.sizes]
        coming = expected if fixed_length else self._lengths(ranks)
        received = [
            ranks.all_to_all(tensor, sizes, sizes_in).split(sizes_in)
            for tensor, sizes, sizes_in in zip(self.tensors, self.sizes, coming, strict=True)
        ]
        return list(zip(*received, strict=True))

    def _lengths(self, ranks: Collectives) -> list[list[int]]:
        """Of each tensor, how much every sender has for this rank."""
        mine = torch.tensor(self.sizes, device=self.tensors[0].device).T.reshape(-1)
        row = [len(self.sizes)] * ranks.size
        theirs: list[list[int]] = ranks.all_to_all(mine, row, row).view(ranks.size, -1).T.tolist()
        return theirs


def _encode(x: Tensor, name: str, memory: StateStore, num_parts: int) -> _PackedMessages:
    coder = _block_coder_of(memory.compressor)
    if coder is None:
        return _encode_parts(x, name, memory, num_parts)
    return _encode_blocks(x, name, memory, num_parts, coder)


def _block_coder_of(compressor: Compressor) -> BlockwiseCompressor | None:
    inner = compressor.compressor if isinstance(compressor, ErrorFeedback) else compressor
    return inner if isinstance(inner, BlockwiseCompressor) else None


def _encode_blocks(
    x: Tensor, name: str, memory: StateStore, num_parts: int, coder: BlockwiseCompressor
) -> _PackedMessages:
    """In one go: a block must not reach into two parts, so these end in entries that are 0."""
    numel = x.numel() // num_parts
    longer = -(-numel // coder.granularity) * coder.granularity
    padded = x
    if longer > numel:
        padded = x.new_zeros(num_parts * longer)
        padded.view(num_parts, longer)[:, :numel].copy_(x.view(num_parts, numel))
    state = memory.of(BufferLayout.flat(padded.numel(), name), x.device)
    message = memory.compressor.compress(padded, state)
    return _PackedMessages(
        list(message),
        [[size] * num_parts for size in coder.sizes(longer)],
        [BufferLayout.flat(longer, name)] * num_parts,
    )


def _encode_parts(x: Tensor, name: str, memory: StateStore, num_parts: int) -> _PackedMessages:
    numel = x.numel() // num_parts
    layouts = [BufferLayout.flat(numel, f"{name}[{index}]") for index in range(num_parts)]
    messages = [
        memory.compressor.compress(part, memory.of(layout, x.device))
        for part, layout in zip(x.split(numel), layouts, strict=True)
    ]
    columns = list(zip(*messages, strict=True))
    return _PackedMessages(
        [torch.cat(column) for column in columns],
        [[tensor.numel() for tensor in column] for column in columns],
        layouts,
    )


def _add(
    messages: Sequence[Message], compressor: Compressor, layout: BufferLayout, total: Tensor
) -> int | None:
    """Add up what messages decode to; the first sender whose message is corrupt."""
    for sender, message in enumerate(messages):
        try:
            compressor.decompress(message, layout, total, accumulate=True)
        except CorruptMessageError:
            if total.device.type != "cpu":
                raise
            return sender
    return None
