"""Layouts of flat buffers: which parameter is where, and states for buffers of another order."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...compression import BufferLayout, Piece
from ...training import FlatBuckets, Segment, plain_name
from ...training.arguments import require

Named = list[tuple[str, Tensor]]
Places = dict[str, int]
"""The pieces of a buffer in order: name and number of entries."""
_GAP = "gap "  # begins the name of a piece that is no parameter


def layouts_of(buckets: FlatBuckets, module: nn.Module) -> list[BufferLayout]:
    """Return the layout of each buffer: its parameters, and each gap between them.

    A buffer of a shard, which may cut parameters, is one piece.
    """
    lengths = [buffer.numel() for buffer in buckets.buffers]
    if not buckets.segments:
        return [BufferLayout.flat(length, f"buffer {i}") for i, length in enumerate(lengths)]
    names = {id(p): plain_name(name) for name, p in module.named_parameters()}
    pairs = zip(buckets.parameters, buckets.tensors, strict=True)
    named = [(names[id(parameter)], tensor) for parameter, tensor in pairs]
    return [
        BufferLayout(tuple(_pieces(named, buckets.segments, bucket, length)))
        for bucket, length in enumerate(lengths)
    ]


def _pieces(named: Named, segments: Sequence[Segment], bucket: int, length: int) -> Iterator[Piece]:
    end = 0
    for (name, tensor), segment in zip(named, segments, strict=True):
        if segment.bucket != bucket:
            continue
        if segment.offset > end:
            yield _gap(bucket, end, segment.offset)
        yield Piece(name, tuple(tensor.shape))
        end = segment.offset + tensor.numel()
    if end < length:
        yield _gap(bucket, end, length)


def _gap(bucket: int, begin: int, end: int) -> Piece:
    return Piece(f"{_GAP}{begin} to {end} of buffer {bucket}", (end - begin,))


def relayout(states: Sequence[Any], saved: Sequence[Places], places: Sequence[Places]) -> list[Any]:
    """Return the states of buffers for other buffers, entry by entry by parameter name.

    Args:
        states: one for each saved buffer, of one structure: tensors as long as the buffer follow
            the parameters, dicts by parameter name likewise, all else is equal in all of them.
    """
    home = {name: index for index, each in enumerate(saved) for name in each}
    missing = [name for place in places for name in place if not is_gap(name) and name not in home]
    if missing:
        raise ValueError(
            f"the saved state must hold all parameters, got one without {missing[0]!r}"
        )
    return [_gather(states, saved, each, home) for each in places]


def _gather(
    nodes: Sequence[Any], saved: Sequence[Places], places: Places, home: Mapping[str, int]
) -> Any:
    first = nodes[0]
    if isinstance(first, dict):
        if any(node.keys() != first.keys() for node in nodes):  # by parameter name
            merged = {name: value for each in nodes for name, value in each.items()}
            return {name: merged[name] for name in places if name in merged}
        of_keys = ((key, [each[key] for each in nodes]) for key in first)
        return {
            key: _equal(column) if key == "masses" else _gather(column, saved, places, home)
            for key, column in of_keys
        }
    if isinstance(first, list | tuple):
        columns = zip(*nodes, strict=True)
        return [_gather(column, saved, places, home) for column in columns]
    if _are_flat(nodes, saved):
        return _join(nodes, saved, places, home)
    return _equal(nodes) if isinstance(first, Tensor) else first


def _equal(nodes: Sequence[Tensor]) -> Tensor:
    rule = "the saved state must be equal in all buffers"
    fix = "load it with the optimizer it was saved with"
    got = "unequal weights: a neighbor had failed"
    require(all(torch.equal(nodes[0], node) for node in nodes), rule, got, fix)
    return nodes[0].clone()


def _are_flat(nodes: Sequence[Any], saved: Sequence[Places]) -> bool:
    """Return whether tensors are as long as their buffers."""
    return all(
        isinstance(node, Tensor) and tuple(node.shape) == (sum(each.values()),)
        for node, each in zip(nodes, saved, strict=True)
    )


def _join(
    nodes: Sequence[Tensor], saved: Sequence[Places], places: Places, home: Mapping[str, int]
) -> Tensor:
    parts = []
    for name, numel in places.items():
        if is_gap(name):
            parts.append(nodes[0].new_zeros(numel))
            continue
        source = saved[home[name]]
        names = list(source)
        begin = sum(source[each] for each in names[: names.index(name)])
        parts.append(nodes[home[name]][begin : begin + numel])
    return torch.cat([part.to(parts[0].dtype) for part in parts])


def is_gap(name: str) -> bool:
    """Return whether a piece of this name is no parameter."""
    return name.startswith(_GAP)
