"""How examples begin: numbers on the command line, and the ranks that torchrun has started."""

import argparse

import torch
import torch.distributed as dist


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text}")
    return int(text)


def join_ranks() -> torch.device | None:
    """Over NCCL with a GPU for each rank, which is returned; else over gloo."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return None
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
