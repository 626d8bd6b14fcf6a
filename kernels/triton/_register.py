"""Registration of Triton launchers under the ops' schemas."""

from collections.abc import Callable

import torch


def register(op: str, launcher: Callable[..., None]) -> None:
    """Let a launcher serve an op on GPUs, unless compiled CUDA code does.

    Two registrations under one key replace each other silently, hence the question first.
    """
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"pyparallel::{op}", "CUDA"):
        torch.library.impl(f"pyparallel::{op}", "CUDA", launcher)
