"""Registration of Triton launchers under the ops' schemas."""

from collections.abc import Callable

import torch


def register(op: str, launcher: Callable[..., None]) -> None:
    """Register a launcher for an op on GPUs, unless compiled CUDA code is registered.

    A second registration under the same key would silently replace the first.
    """
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"pyparallel::{op}", "CUDA"):
        torch.library.impl(f"pyparallel::{op}", "CUDA", launcher)
