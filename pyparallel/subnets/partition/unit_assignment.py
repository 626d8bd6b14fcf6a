"""Random assignment of units to subnets: all ranks draw the same, so no indices are sent."""

import zlib
from itertools import pairwise

import torch
from torch import Tensor


def sizes(units: int, num_subnets: int) -> tuple[int, ...]:
    """Return each subnet's number of units: the same in all rounds, differing by at most 1."""
    bounds = [part * units // num_subnets for part in range(num_subnets + 1)]
    return tuple(end - begin for begin, end in pairwise(bounds))


def draw_units(
    name: str, units: int, num_subnets: int, *, seed: int, round_index: int
) -> list[Tensor]:
    """Draw the units of each subnet in a round: an independent random permutation, split.

    Pieces are 1-d int64 and ascending, so that a single subnet is the full model.
    """
    # manual_seed uses 32 bits of its argument, and Python's hash differs between processes.
    number = zlib.crc32(f"{seed}/{round_index}/{name}".encode())
    order = torch.randperm(units, generator=torch.Generator().manual_seed(number), device="cpu")
    return [piece.sort().values for piece in order.split(list(sizes(units, num_subnets)))]
