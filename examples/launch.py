"""Shared setup of the examples: command-line numbers and torchrun's process group."""

import argparse

import torch
import torch.distributed as dist


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text}")
    return int(text)


def join_ranks() -> torch.device | None:
    """Initialize NCCL with one GPU per rank, which is returned; without GPUs gloo."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return None
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
