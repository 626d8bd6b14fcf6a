"""Hooks that attach a compressor to DDP and FSDP2."""

from .ddp import GradientCompression, compressed_hook, ddp_hook

__all__ = ["GradientCompression", "compressed_hook", "ddp_hook"]
