"""Hooks that attach a compressor to DDP and FSDP2."""

from .ddp import GradientCompression, compress_ddp

__all__ = ["GradientCompression", "compress_ddp"]
