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
from ..validation import CorruptMessageError, naming_the_sender, raise_if_any_corrupt
from ..wrappers.error_feedback import ErrorFeedback


def scatter_sum(x: Tensor, name: str, store: StateStore, collectives: Collectives) -> Tensor:
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
    numel = x.numel() // collectives.size
    if numel == 0:
        return x.float()
    with collectives.stats.encoding():
        packed = _encode(x, name, store, collectives.size)
    received = packed.exchange(collectives, fixed_length=store.compressor.fixed_length)
    with collectives.stats.decoding():
        total = torch.zeros(packed.layouts[0].numel, dtype=torch.float32, device=x.device)
        culprit = _add(received, store.compressor, packed.layouts[collectives.rank], total)
    if x.device.type == "cpu":  # elsewhere the device stops, and the host does not wait
        raise_if_any_corrupt(culprit, collectives)
    return total[:numel]


def gather(x: Tensor, out: Tensor, name: str, store: StateStore, collectives: Collectives) -> None:
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
    layout, compressor = BufferLayout.flat(x.numel(), name), store.compressor
    with collectives.stats.encoding():
        message = compressor.compress(x, store.of(layout, x.device))
    if compressor.fixed_length:
        messages = list(zip(*[collectives.all_gather(tensor) for tensor in message], strict=True))
    else:
        messages = collectives.all_gather_uneven(message)
    with collectives.stats.decoding():
        parts = out.view(collectives.size, x.numel())
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

    def exchange(self, collectives: Collectives, *, fixed_length: bool) -> list[Message]:
        """What all ranks have for this one, by sender."""
        expected = [[sizes[collectives.rank]] * collectives.size for sizes in self.sizes]
        coming = expected if fixed_length else self._lengths(collectives)
        received = [
            collectives.all_to_all(tensor, sizes, sizes_in).split(sizes_in)
            for tensor, sizes, sizes_in in zip(self.tensors, self.sizes, coming, strict=True)
        ]
        return list(zip(*received, strict=True))

    def _lengths(self, collectives: Collectives) -> list[list[int]]:
        """Of each tensor, how much every sender has for this rank."""
        mine = torch.tensor(self.sizes, device=self.tensors[0].device).T.reshape(-1)
        row = [len(self.sizes)] * collectives.size
        theirs: list[list[int]] = (
            collectives.all_to_all(mine, row, row).view(collectives.size, -1).T.tolist()
        )
        return theirs


def _encode(x: Tensor, name: str, store: StateStore, num_parts: int) -> _PackedMessages:
    blockwise = _blockwise_of(store.compressor)
    if blockwise is None:
        return _encode_parts(x, name, store, num_parts)
    return _encode_blocks(x, name, store, num_parts, blockwise)


def _blockwise_of(compressor: Compressor) -> BlockwiseCompressor | None:
    inner = compressor.compressor if isinstance(compressor, ErrorFeedback) else compressor
    return inner if isinstance(inner, BlockwiseCompressor) else None


def _encode_blocks(
    x: Tensor, name: str, store: StateStore, num_parts: int, blockwise: BlockwiseCompressor
) -> _PackedMessages:
    """In one go: a block must not reach into two parts, so these end in entries that are 0."""
    numel = x.numel() // num_parts
    longer = -(-numel // blockwise.granularity) * blockwise.granularity
    padded = x
    if longer > numel:
        padded = x.new_zeros(num_parts * longer)
        padded.view(num_parts, longer)[:, :numel].copy_(x.view(num_parts, numel))
    state = store.of(BufferLayout.flat(padded.numel(), name), x.device)
    message = store.compressor.compress(padded, state)
    return _PackedMessages(
        list(message),
        [[size] * num_parts for size in blockwise.sizes(longer)],
        [BufferLayout.flat(longer, name)] * num_parts,
    )


def _encode_parts(x: Tensor, name: str, store: StateStore, num_parts: int) -> _PackedMessages:
    numel = x.numel() // num_parts
    layouts = [BufferLayout.flat(numel, f"{name}[{index}]") for index in range(num_parts)]
    messages = [
        store.compressor.compress(part, store.of(layout, x.device))
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
