"""A reduce-scatter and an all-gather of compressed messages; each rank encodes its input once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...comm.collectives import Collectives, int64_on
from ..compressor import Compressor, Message
from ..corrupt_messages import CorruptMessageError, raise_if_any_corrupt, with_sender
from ..layout import BufferLayout, Piece
from ..quantizers.blockwise import BlockwiseCompressor
from ..state_store import StateStore
from ..wrappers.error_feedback import ErrorFeedback


def compressed_reduce_scatter(
    x: Tensor,
    name: str,
    store: StateStore,
    collectives: Collectives,
    pieces: Sequence[Piece] = (),
) -> Tensor:
    """Return this rank's shard of the sum over ranks of the decoded messages, (numel,) float32.

    Shard i of x, (ranks * numel,), is for rank i. Its ``pieces`` are the keys of the state, which
    the sender keeps; without them the buffer is one, of this ``name``, which also seeds random
    draws. A CorruptMessageError on every rank names who sent the corrupt message.
    """
    numel = x.numel() // collectives.size
    if numel == 0:
        return x.float()
    inner = store.compressor
    inner = inner.compressor if isinstance(inner, ErrorFeedback) else inner
    blockwise = inner if isinstance(inner, BlockwiseCompressor) else None
    with collectives.stats.encoding():
        packed = _encode(x, name, pieces, store, collectives.size, blockwise)
    received = packed.exchange(collectives, fixed_length=store.compressor.fixed_length)
    with collectives.stats.decoding():
        total = torch.zeros(packed.layouts[0].numel, dtype=torch.float32, device=x.device)
        corrupt_sender = _add(received, store.compressor, packed.layouts[collectives.rank], total)
    accepts_all = blockwise is not None and blockwise.accepts_all
    # A GPU counts corrupt entries, and a later message raises: the host does not wait.
    if x.device.type == "cpu" and not accepts_all:
        raise_if_any_corrupt(corrupt_sender, collectives)
    return total[:numel]


def compressed_all_gather(
    x: Tensor, out: Tensor, name: str, store: StateStore, collectives: Collectives
) -> None:
    """All-gather decoded messages: the same bits on all ranks, this rank's own shard included."""
    if x.numel() == 0:
        return
    layout, compressor = BufferLayout.flat(x.numel(), name), store.compressor
    with collectives.stats.encoding():
        message = compressor.compress(x, store.of(layout, x.device))
    if compressor.fixed_length:
        messages = collectives.all_gather_each(message)
    else:
        messages = collectives.all_gather_uneven(message)
    with collectives.stats.decoding():
        parts = out.view(collectives.size, x.numel())
        for sender, (each, part) in enumerate(zip(messages, parts, strict=True)):
            with with_sender(sender):
                compressor.decompress(each, layout, part)


@dataclass(frozen=True)
class _PackedMessages:
    """Messages for all ranks, tensor by tensor in rank order; ``sizes`` are theirs, by rank."""

    tensors: list[Tensor]
    sizes: list[list[int]]
    layouts: list[BufferLayout]

    def exchange(self, collectives: Collectives, *, fixed_length: bool) -> list[Message]:
        """Send the messages; return those received, by sender."""
        expected = [[sizes[collectives.rank]] * collectives.size for sizes in self.sizes]
        coming = expected if fixed_length else self._lengths(collectives)
        received = [
            collectives.all_to_all(tensor, sizes, sizes_in).split(sizes_in)
            for tensor, sizes, sizes_in in zip(self.tensors, self.sizes, coming, strict=True)
        ]
        return list(zip(*received, strict=True))

    def _lengths(self, collectives: Collectives) -> list[list[int]]:
        """Return, for each tensor, the number of entries that each sender has for this rank."""
        of_receivers = [size for sizes in zip(*self.sizes, strict=True) for size in sizes]
        mine = int64_on(self.tensors[0].device, of_receivers)
        row = [len(self.sizes)] * collectives.size
        theirs: list[list[int]] = (
            collectives.all_to_all(mine, row, row).view(collectives.size, -1).T.tolist()
        )
        return theirs


def _encode(
    x: Tensor,
    name: str,
    pieces: Sequence[Piece],
    store: StateStore,
    num_parts: int,
    blockwise: BlockwiseCompressor | None,
) -> _PackedMessages:
    if blockwise is None:
        return _encode_parts(x, name, pieces, store, num_parts)
    # In one call. A block must not span two shards, so shards are padded with zeros.
    numel = x.numel() // num_parts
    longer = -(-numel // blockwise.granularity) * blockwise.granularity
    padded = x
    if longer > numel:
        padded = x.new_zeros(num_parts * longer)
        padded.view(num_parts, longer)[:, :numel].copy_(x.view(num_parts, numel))
    layout = BufferLayout.flat(padded.numel(), name)
    if pieces:
        if longer > numel:  # some compressors send padding too
            padding = Piece(f"{name} padding {longer - numel}", (longer - numel,))
            pieces = *pieces, padding
        layout = BufferLayout(_parts_of(pieces, range(num_parts)), name)
    message = store.compressor.compress(padded, store.of(layout, x.device))
    return _PackedMessages(
        list(message),
        [[size] * num_parts for size in blockwise.sizes(longer)],
        [BufferLayout.flat(longer, name)] * num_parts,
    )


def _encode_parts(
    x: Tensor, name: str, pieces: Sequence[Piece], store: StateStore, num_parts: int
) -> _PackedMessages:
    numel = x.numel() // num_parts
    layouts = [BufferLayout.flat(numel, f"{name}[{index}]") for index in range(num_parts)]
    if pieces:
        layouts = [
            BufferLayout(_parts_of(pieces, [index]), layout.names[0])
            for index, layout in enumerate(layouts)
        ]
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


def _parts_of(pieces: Sequence[Piece], receivers: Iterable[int]) -> tuple[Piece, ...]:
    """Return the pieces that are sent to ranks."""
    return tuple(
        replace(piece, name=f"{piece.name}[{index}]") for index in receivers for piece in pieces
    )


def _add(
    messages: Sequence[Message], compressor: Compressor, layout: BufferLayout, total: Tensor
) -> int | None:
    """Add up decoded messages; return the first sender whose message is corrupt, or None."""
    for sender, message in enumerate(messages):
        try:
            compressor.decompress(message, layout, total, accumulate=True)
        except CorruptMessageError:
            if total.device.type != "cpu":
                raise
            return sender
    return None
