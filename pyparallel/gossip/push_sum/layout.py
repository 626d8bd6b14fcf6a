"""Layouts of the flat buffers that gossip sends: which parameter is where."""

from collections.abc import Iterator

from torch import nn

from ...comm import FlatBuckets
from ...compression import BufferLayout, Piece


def layouts_of(buckets: FlatBuckets, module: nn.Module) -> list[BufferLayout]:
    """Return the layout of each buffer: parameters, and each gap between them as its own piece.

    A buffer of a shard, which may cut parameters, is one piece.

    Args:
        buckets: the trainable parameters of the module.
        module: gives the parameters' names.
    """
    if not buckets.segments:
        return [
            BufferLayout.flat(buffer.numel(), f"buffer {index}")
            for index, buffer in enumerate(buckets.buffers)
        ]
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        BufferLayout(tuple(_pieces(buckets, names, bucket)))
        for bucket in range(len(buckets.buffers))
    ]


def _pieces(buckets: FlatBuckets, names: dict[int, str], bucket: int) -> Iterator[Piece]:
    end = 0
    for parameter, segment in zip(buckets.parameters, buckets.segments, strict=True):
        if segment.bucket != bucket:
            continue
        if segment.offset > end:
            yield _gap(bucket, end, segment.offset)
        yield Piece(names[id(parameter)], tuple(parameter.shape))
        end = segment.offset + segment.numel
    if end < buckets.buffers[bucket].numel():
        yield _gap(bucket, end, buckets.buffers[bucket].numel())


def _gap(bucket: int, begin: int, end: int) -> Piece:
    return Piece(f"gap {begin} to {end} of buffer {bucket}", (end - begin,))
