"""The local work of a DDP hook on a bucket, as of one of eight ranks: check, encode and decode.

The other ranks' messages are copies of the own one, which are made on the device in place of the
collectives. Every call begins with a copy of the gradients into the bucket, which is counted: the
hook replaces them by their mean.
"""

import atexit
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from benchmarks.compression.cost import of_torch
from benchmarks.harness.measure import Case, Provider, sweep
from pyparallel.compression import (
    BufferLayout,
    Collectives,
    ErrorFeedback,
    Int8,
    Piece,
    PowerSGD,
    Sign,
    TopK,
)
from pyparallel.compression.nonfinite import NonFiniteCheck

NUM_RANKS = 8
WIDTH = 2048  # of the matrices, at most
COMPRESSORS = {
    # compressor, and the bytes of an entry that it must read and write: the gradient and the
    # residual, the mean, and messages of the bucket and of a rank's part of it
    "TopK(0.01), residual": (ErrorFeedback(TopK(0.01)), 16),
    "Int8, residual": (ErrorFeedback(Int8()), 21),
    "Sign, residual": (ErrorFeedback(Sign()), 18),
    "PowerSGD(4), residual": (ErrorFeedback(PowerSGD(4)), 28),
}


class Copies(Collectives):
    """Collectives of ranks that all have this one's tensors; sums are left as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.size = NUM_RANKS

    @override
    def _run(
        self, name: str, collective: Callable[..., Any], *arguments: Any, **options: Any
    ) -> None:
        if name != "all-reduce":
            received, sent, *_ = arguments
            num_copies = received.numel() // max(1, sent.numel())
            received.view(num_copies, -1).copy_(sent.view(1, -1))


def layout_of(numel: int) -> BufferLayout:
    """Return square matrices of as many elements: the largest whose width is a power of two."""
    width = min(WIDTH, 2 ** (((numel & -numel).bit_length() - 1) // 2))
    return BufferLayout(
        tuple(Piece(f"{i}.weight", (width, width)) for i in range(numel // width**2))
    )


def make_case(device: str, numel: int, name: str) -> Case:
    compressor, bytes_of_entry = COMPRESSORS[name]
    layout, collectives, check = layout_of(numel), Copies(), NonFiniteCheck("raise")
    state = compressor.init(layout, torch.device(device), collectives.rank)
    gradients = torch.randn(layout.numel, device=device)
    steps = count()

    def timed(average: Callable[[Tensor], object]) -> Callable[[], None]:
        bucket = torch.empty_like(gradients)

        @torch.no_grad()
        def run() -> None:
            bucket.copy_(gradients)
            average(bucket)

        return run

    def ours(bucket: Tensor) -> None:
        check.mean_(compressor, bucket, layout, lambda: state, collectives, next(steps))

    providers = [Provider("pyparallel", timed(ours), captured=False)]
    if isinstance(compressor.parts[0], PowerSGD):
        join_group_of_one(device)
        providers.append(Provider("torch powerSGD_hook", timed(of_torch(layout)), captured=False))
    num_bytes = (8 + bytes_of_entry) * layout.numel
    return Case("hooks", name, layout.numel, num_bytes, providers, device)


def join_group_of_one(device: str) -> None:
    if not dist.is_initialized():
        backend = "nccl" if device == "cuda" else "gloo"
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        atexit.register(dist.destroy_process_group)


cases = sweep((make_case, [(name,) for name in COMPRESSORS]))
