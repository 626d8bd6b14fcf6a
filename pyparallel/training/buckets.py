"""Flat buffers with parameters as views, so that a model is sent in a few messages."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import eq
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .shards import is_sharded, local_of, move_shard, padded_numel

ALIGNMENT_BYTES = 256  # of each parameter: wide loads on every device, no shared cache line
SHARD_ALIGNMENT_BYTES = 16  # of each shard: one wide load; divides ALIGNMENT_BYTES


@dataclass(frozen=True)
class Segment:
    """The place of a parameter: ``numel`` elements from ``offset`` of buffer ``bucket``."""

    bucket: int
    offset: int
    numel: int


@dataclass(frozen=True)
class BucketAssignment:
    """One segment per parameter, and the dtype and length in elements of each buffer."""

    segments: tuple[Segment, ...]
    dtypes: tuple[torch.dtype, ...]
    lengths: tuple[int, ...]


def assign_buckets(
    parameters: Sequence[tuple[int, torch.dtype]], cap_bytes: int
) -> BucketAssignment:
    """Assign parameters, (numel, dtype), whole to buffers of a dtype and about cap_bytes."""
    segments: list[Segment] = []
    dtypes: list[torch.dtype] = []
    lengths: list[int] = []
    open_bucket: dict[torch.dtype, int] = {}
    for numel, dtype in parameters:
        step = ALIGNMENT_BYTES // dtype.itemsize
        padded = -(-numel // step) * step
        bucket = open_bucket.get(dtype)
        if bucket is None or (lengths[bucket] + padded) * dtype.itemsize > cap_bytes:
            bucket = open_bucket[dtype] = len(lengths)
            dtypes.append(dtype)
            lengths.append(0)
        segments.append(Segment(bucket, lengths[bucket], numel))
        lengths[bucket] += padded
    return BucketAssignment(tuple(segments), tuple(dtypes), tuple(lengths))


class _Memory(NamedTuple):
    """Buffers, each parameter's segment of them, and the address of each parameter in them."""

    buffers: list[Tensor]
    segments: tuple[Segment, ...]
    addresses: list[int]


class FlatBuckets:
    """Flat buffers that hold all parameters, each parameter a view of its segment.

    The ``nn.Parameter`` objects stay the same, so optimizers, hooks and compiled modules that hold
    them keep working. The gaps between parameters are zero and stay zero under averaging. Of a
    parameter that FSDP2 has sharded they hold this rank's shard, followed by FSDP2's padding, which
    is a gap; a shard may be empty.

    Args:
        parameters: dense real parameters, all on one device.
        memory: buffers that hold the parameters already; None: allocate them.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], cap_bytes: int, memory: _Memory | None = None
    ) -> None:
        self.parameters = list(parameters)
        self.cap_bytes = cap_bytes
        self._identities = {id(parameter) for parameter in self.parameters}
        self._are_sharded = any(map(is_sharded, self.parameters))
        memory = _flatten(self.parameters, cap_bytes) if memory is None else memory
        self.buffers, self.segments, self._addresses = memory

    @property
    def tensors(self) -> list[Tensor]:
        """Return what the buffers hold of each parameter: it, or this rank's shard of it."""
        return list(map(local_of, self.parameters) if self._are_sharded else self.parameters)

    def check(self, optimized: Iterable[nn.Parameter]) -> None:
        """Raise a RuntimeError unless these are the parameters, all still views of the buffers."""
        addresses = list(map(Tensor.data_ptr, self.tensors))
        if addresses != self._addresses:
            moved = list(map(eq, addresses, self._addresses)).index(False)
            raise RuntimeError(
                f"parameters must stay views of their flat buffers, but parameter {moved} of "
                f"shape {list(self.parameters[moved].shape)} has new storage (from converting or "
                "moving the module, from sharding it, or from wrapping it again without close())"
            )
        # A gradient from before it was frozen would still be applied.
        others = [p for p in optimized if id(p) not in self._identities]
        added = sum(p.requires_grad or p.grad is not None for p in others)
        if added:
            raise RuntimeError(
                "the optimizer must train the parameters it had when it was wrapped, got "
                f"{added} that are new, or were frozen then, or are frozen with a gradient, and "
                "would not be averaged; close() and wrap again"
            )

    @property
    def first_has_moved(self) -> bool:
        """Whether the first parameter is no view of the buffers, as after ``module.double()``."""
        return local_of(self.parameters[0]).data_ptr() != self._addresses[0]

    def views(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Return each parameter's view of other buffers with the same layout as ``buffers``."""
        return [
            buffers[segment.bucket]
            .narrow(0, segment.offset, segment.numel)
            .as_strided(tensor.size(), tensor.stride())
            for tensor, segment in zip(self.tensors, self.segments, strict=True)
        ]

    def find_parts(self, tensor: Tensor) -> list[tuple[int, slice]]:
        """Return which entries of a flat part of a buffer are of which parameter, by index."""
        begin, size, parts = tensor.data_ptr(), tensor.element_size(), []
        owners = zip(self.tensors, self._addresses, strict=True)
        for index, (own, address) in enumerate(owners):
            first = (address - begin) // size
            end = min(tensor.numel(), first + own.numel())
            if max(0, first) < end:
                parts.append((index, slice(max(0, first), end)))
        return parts

    def shard(self, index: int, num_shards: int) -> "FlatBuckets":
        """Return the same parameters with views of shard ``index`` of each buffer only.

        Shards are aligned, and as equal as that allows; empty ones are left out.
        """
        parts = []
        for buffer in self.buffers:
            unit = SHARD_ALIGNMENT_BYTES // buffer.element_size()
            units = buffer.numel() // unit
            begin, end = (unit * (units * each // num_shards) for each in (index, index + 1))
            if end > begin:
                parts.append(buffer[begin:end])
        # A parameter may span two shards: it has no segment.
        return FlatBuckets(self.parameters, self.cap_bytes, _Memory(parts, (), self._addresses))

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers: the size of one message to one neighbor."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)


def join_buckets(parts: Sequence[FlatBuckets]) -> FlatBuckets:
    """Return the buckets of all parts in order as one; the buffers are the same."""
    buffers: list[Tensor] = []
    segments: list[Segment] = []
    for part in parts:
        first = len(buffers)
        segments += [replace(segment, bucket=first + segment.bucket) for segment in part.segments]
        buffers += part.buffers
    addresses = [address for each in parts for address in each._addresses]
    memory = _Memory(buffers, tuple(segments), addresses)
    parameters = [parameter for each in parts for parameter in each.parameters]
    return FlatBuckets(parameters, max((each.cap_bytes for each in parts), default=0), memory)


def _flatten(parameters: Sequence[nn.Parameter], cap_bytes: int) -> _Memory:
    plan = assign_buckets([(padded_numel(p), p.dtype) for p in parameters], cap_bytes)
    buffers = [  # empty without parameters
        torch.zeros(length, dtype=dtype, device=local_of(parameters[0]).device)
        for dtype, length in zip(plan.dtypes, plan.lengths, strict=True)
    ]
    with torch.no_grad():
        for parameter, segment in zip(parameters, plan.segments, strict=True):
            tensor = local_of(parameter)
            flat = buffers[segment.bucket].narrow(0, segment.offset, tensor.numel())
            view = flat.as_strided(tensor.size(), _dense_strides(tensor))
            view.copy_(tensor)
            move_shard(parameter, view)
    tensors = list(map(local_of, parameters))
    pairs = zip(plan.segments, tensors, strict=True)
    segments = tuple(replace(segment, numel=tensor.numel()) for segment, tensor in pairs)
    return _Memory(buffers, segments, [tensor.data_ptr() for tensor in tensors])


def _dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the parameter's strides if it is dense (channels_last is), else contiguous ones."""
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    if parameter.permute(order).is_contiguous():
        return parameter.stride()
    return torch.empty(parameter.size(), device="meta").stride()
