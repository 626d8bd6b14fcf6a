"""What a DDP hook does with a bucket on one rank, where nothing is sent: check, encode and decode.

Every call begins with a copy of the gradients into the bucket, which is counted: the hook replaces
them by their mean.
"""

import atexit

import torch
import torch.distributed as dist

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

WIDTH = 2048  # of the matrices, at most
COMPRESSORS = {
    # compressor, bytes that an element must cost besides its message
    "TopK(0.01), residual": (ErrorFeedback(TopK(0.01)), 12 + 4),
    "Int8, residual": (ErrorFeedback(Int8()), 12 + 4),
    "Sign, residual": (ErrorFeedback(Sign()), 12 + 4),
    "PowerSGD(4), residual": (ErrorFeedback(PowerSGD(4)), 28),
}


def layout_of(numel: int) -> BufferLayout:
    """Return square matrices of as many elements, a power of two."""
    width = min(WIDTH, 2 ** ((numel.bit_length() - 1) // 2))
    return BufferLayout(
        tuple(Piece(f"{i}.weight", (width, width)) for i in range(numel // width**2))
    )


def make_case(device: str, numel: int, name: str) -> Case:
    compressor, bytes_of_element = COMPRESSORS[name]
    layout, collectives = layout_of(numel), Collectives()
    state = compressor.init(layout, torch.device(device), collectives.rank)
    gradients = torch.randn(layout.numel, device=device)
    bucket = torch.empty_like(gradients)

    @torch.no_grad()
    def ours() -> None:
        bucket.copy_(gradients)
        compressor.mean_(bucket, state, collectives)

    providers = [Provider("pyparallel", ours, captured=False)]
    if "PowerSGD" in name:
        join_group_of_one(device)
        average = of_torch(layout)
        other = torch.empty_like(gradients)

        @torch.no_grad()
        def torch_hook() -> None:
            other.copy_(gradients)
            average(other)

        providers.append(Provider("torch powerSGD_hook", torch_hook, captured=False))
    num_bytes = (8 + bytes_of_element) * layout.numel
    return Case("hooks", name, layout.numel, num_bytes, providers, device)


def join_group_of_one(device: str) -> None:
    if not dist.is_initialized():
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(dist.destroy_process_group)


cases = sweep((make_case, [(name,) for name in COMPRESSORS]))
