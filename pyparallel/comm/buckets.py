"""Parameters as views of a few flat buffers, so that a model travels in a few messages."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGNMENT_BYTES = 256  # where a parameter begins: wide loads on every device, no shared cache line
SHARD_ALIGNMENT_BYTES = 16  # where a shard begins: one wide load; divides ALIGNMENT_BYTES


@dataclass(frozen=True)
class Segment:
    """Where a parameter lies: ``numel`` elements from ``offset`` of buffer ``bucket``."""

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
    """Lay parameters, given as (numel, dtype), into buffers of one dtype and about cap_bytes each.

    A parameter is never split: one larger than the cap gets a buffer of its own.
    """
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


class FlatBuckets:
    """Moves parameters into flat buffers and turns each into a view of its place there.

    The ``nn.Parameter`` objects stay the same, so optimizers, hooks and compiled modules that hold
    them keep working. The gaps between parameters are zero and stay zero under averaging.

    Args:
        parameters: dense real parameters of float32, bfloat16 or float16, all on one device.
        cap_bytes: about how large a buffer may become.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], cap_bytes: int) -> None:
        self.parameters = list(parameters)
        self._identities = {id(parameter) for parameter in self.parameters}
        plan = assign_buckets([(p.numel(), p.dtype) for p in self.parameters], cap_bytes)
        self.buffers: list[Tensor] = [  # none without parameters
            torch.zeros(length, dtype=dtype, device=self.parameters[0].device)
            for dtype, length in zip(plan.dtypes, plan.lengths, strict=True)
        ]
        with torch.no_grad():
            for parameter, segment in zip(self.parameters, plan.segments, strict=True):
                flat = self.buffers[segment.bucket].narrow(0, segment.offset, segment.numel)
                view = flat.as_strided(parameter.size(), _dense_strides(parameter))
                view.copy_(parameter)
                parameter.data = view
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        self.segments = plan.segments

    def check(self, optimized: Iterable[nn.Parameter]) -> None:
        """Refuse to go on with parameters that have left the buffers, or that were never in them.

        Args:
            optimized: all parameters that the optimizer steps on now.
        """
        for index, (parameter, address) in enumerate(
            zip(self.parameters, self._addresses, strict=True)
        ):
            if parameter.data_ptr() != address:
                raise RuntimeError(
                    f"parameters must stay views of their flat buffers, but parameter {index} of "
                    f"shape {list(parameter.shape)} was given other memory (by converting or "
                    "moving the module, or by wrapping it again without close())"
                )
        added = sum(id(parameter) not in self._identities for parameter in optimized)
        if added:
            raise RuntimeError(
                "the optimizer must keep the parameters it had when it was wrapped, got "
                f"{added} more, which no rank would average; close() and wrap again"
            )

    def views(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """What each parameter would be in other buffers that are laid out like ``buffers``."""
        return [
            buffers[segment.bucket]
            .narrow(0, segment.offset, segment.numel)
            .as_strided(parameter.size(), parameter.stride())
            for parameter, segment in zip(self.parameters, self.segments, strict=True)
        ]

    def shard(self, index: int, num_shards: int) -> "FlatBuckets":
        """The same parameters, but of the buffers only part ``index`` of ``num_shards``: views.

        Parts begin where wide loads may, and are as equal as that allows; a buffer too small to
        give every part something may give one nothing, which is then left out.
        """
        part = copy.copy(self)
        part.buffers = []
        part.segments = ()  # a parameter may lie across two parts
        for buffer in self.buffers:
            unit = SHARD_ALIGNMENT_BYTES // buffer.element_size()
            units = buffer.numel() // unit
            begin, end = (unit * (units * each // num_shards) for each in (index, index + 1))
            if end > begin:
                part.buffers.append(buffer[begin:end])
        return part

    @property
    def num_bytes(self) -> int:
        """What one copy of all buffers weighs: the size of one message to one neighbor."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)


def _dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's own strides where it is dense (channels_last is), else contiguous ones."""
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    if parameter.permute(order).is_contiguous():
        return parameter.stride()
    return torch.empty(parameter.size(), device="meta").stride()
