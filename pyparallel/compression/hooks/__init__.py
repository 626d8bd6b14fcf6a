"""Hooks that attach a compressor to DDP, compiled DDP and FSDP2."""

from .ddp import GradientCompression, compressed_hook, ddp_hook
from .fsdp import (
    CompressedAllGather,
    CompressedReduceScatter,
    FSDPCompression,
    compress_fsdp,
    fsdp_all_gather,
    fsdp_reduce_scatter,
)

__all__ = [
    "CompressedAllGather",
    "CompressedReduceScatter",
    "FSDPCompression",
    "GradientCompression",
    "compress_fsdp",
    "compressed_hook",
    "ddp_hook",
    "fsdp_all_gather",
    "fsdp_reduce_scatter",
]
