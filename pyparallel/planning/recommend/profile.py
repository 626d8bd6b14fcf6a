"""Profiling of compressors on a single rank."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ...compression import BufferLayout, Compressor
from ..simulate import Cost, SingleRankCollectives
from .candidates import Candidate

Bucket = list[tuple[str, nn.Parameter]]

BUCKET_BYTES = (2**20, 25 * 2**20)  # DistributedDataParallel's defaults: first bucket, others
_WARM_UP = 2
_REPEATS = 5


def profile(candidate: Candidate, buckets: Sequence[Bucket], num_ranks: int) -> Cost:
    """Measure what it costs to average the gradients of these parameters; medians of a few runs."""
    collectives, compressor = SingleRankCollectives(num_ranks), candidate.steady_state
    num_bytes = sum(map(num_bytes_of, buckets))
    if compressor is None:
        for bucket in buckets:
            collectives.all_reduce_(flat_gradients(bucket))
        seconds = [0.0]
    else:
        runs = _runs(compressor, buckets, num_ranks)
        collectives, seconds = runs[-1][0], [elapsed for _, elapsed in runs[_WARM_UP:]]
    stats = collectives.stats
    return Cost(
        candidate.name,
        statistics.median(seconds),
        stats.payload_bytes,
        stats.wire_bytes,
        collectives.collectives,
        tuple(num_bytes_of(bucket) / num_bytes for bucket in buckets),
    )


def _runs(
    compressor: Compressor, buckets: Sequence[Bucket], num_ranks: int
) -> list[tuple[SingleRankCollectives, float]]:
    device = buckets[0][0][1].device
    states = [compressor.init(BufferLayout.of(bucket), device) for bucket in buckets]
    runs = []
    for _ in range(_WARM_UP + _REPEATS):
        collectives, seconds = SingleRankCollectives(num_ranks), 0.0
        for bucket, state in zip(buckets, states, strict=True):
            average = partial(compressor.mean_, flat_gradients(bucket), state, collectives)
            seconds += timed(average, device)
        runs.append((collectives, seconds))
    return runs


def timed(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, including the GPU work that it launches."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def in_buckets(
    named: Iterable[tuple[str, nn.Parameter]], limits: tuple[int, int] = BUCKET_BYTES
) -> Iterator[Bucket]:
    """Yield buckets as DistributedDataParallel builds them: the last parameters first, by dtype.

    ``limits`` are the bytes at which a dtype's first bucket is full, and the others.
    """
    first, others = limits
    open_buckets: dict[torch.dtype, Bucket] = {}
    limit_of: dict[torch.dtype, int] = {}
    for name, parameter in reversed(list(named)):
        bucket = open_buckets.setdefault(parameter.dtype, [])
        bucket.append((name, parameter))
        if num_bytes_of(bucket) >= limit_of.get(parameter.dtype, first):
            limit_of[parameter.dtype] = others
            yield open_buckets.pop(parameter.dtype)
    yield from open_buckets.values()


def num_bytes_of(bucket: Bucket) -> int:
    """Return the bytes of a bucket's gradients."""
    return sum(parameter.numel() * parameter.element_size() for _, parameter in bucket)


def flat_gradients(bucket: Bucket) -> Tensor:
    """Return a flat copy of a bucket's gradients, zeros for parameters without one."""
    gradients = (torch.zeros_like(p) if p.grad is None else p.grad for _, p in bucket)
    return torch.cat([gradient.flatten() for gradient in gradients])
