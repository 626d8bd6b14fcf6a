"""Layouts of the flat buffers that gossip sends: which parameter is where."""

from collections.abc import Iterator, Sequence

from torch import nn

from ...compression import BufferLayout, Piece
from ...training import FlatBuckets, Segment, assign_buckets, plain_name

Named = list[tuple[str, nn.Parameter]]


def layouts_of(buckets: FlatBuckets, module: nn.Module) -> list[BufferLayout]:
    """Return the layout of each buffer: its parameters, and each gap between them.

    A buffer of a shard, which may cut parameters, is one piece.
    """
    lengths = [buffer.numel() for buffer in buckets.buffers]
    if not buckets.segments:
        return [BufferLayout.flat(length, f"buffer {i}") for i, length in enumerate(lengths)]
    names = {id(p): plain_name(name) for name, p in module.named_parameters()}
    named = [(names[id(parameter)], parameter) for parameter in buckets.parameters]
    return _layouts(named, buckets.segments, lengths)


def layouts_in_module_order(buckets: FlatBuckets, module: nn.Module) -> list[BufferLayout]:
    """Return the layouts that the parameters have without a fused optimizer."""
    if not buckets.segments:
        return layouts_of(buckets, module)
    trained = {id(parameter) for parameter in buckets.parameters}
    found = module.named_parameters()
    named = [(plain_name(name), p) for name, p in found if id(p) in trained]
    plan = assign_buckets([(p.numel(), p.dtype) for _, p in named], buckets.cap_bytes)
    return _layouts(named, plan.segments, plan.lengths)


def _layouts(
    named: Named, segments: Sequence[Segment], lengths: Sequence[int]
) -> list[BufferLayout]:
    return [
        BufferLayout(tuple(_pieces(named, segments, bucket, length)))
        for bucket, length in enumerate(lengths)
    ]


def _pieces(named: Named, segments: Sequence[Segment], bucket: int, length: int) -> Iterator[Piece]:
    end = 0
    for (name, parameter), segment in zip(named, segments, strict=True):
        if segment.bucket != bucket:
            continue
        if segment.offset > end:
            yield _gap(bucket, end, segment.offset)
        yield Piece(name, tuple(parameter.shape))
        end = segment.offset + segment.numel
    if end < length:
        yield _gap(bucket, end, length)


def _gap(bucket: int, begin: int, end: int) -> Piece:
    return Piece(f"gap {begin} to {end} of buffer {bucket}", (end - begin,))
