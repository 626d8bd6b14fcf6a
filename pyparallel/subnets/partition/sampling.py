"""Which units each subnet has in a round: drawn alike by all ranks, so that no index travels."""

import zlib
from itertools import pairwise

import torch
from torch import Tensor


def sizes(units: int, num_subnets: int) -> tuple[int, ...]:
    """How many units each subnet has: the same in all rounds, and apart by at most 1."""
    bounds = [part * units // num_subnets for part in range(num_subnets + 1)]
    return tuple(end - begin for begin, end in pairwise(bounds))


def draw(name: str, units: int, num_subnets: int, *, seed: int, round_index: int) -> list[Tensor]:
    """The units of each subnet in a round: a random permutation in as many pieces.

    Args:
        name: of the width; each width is permuted by itself.
        units: how many there are.
        num_subnets: pieces.
        seed: of the run.
        round_index: from 0.

    Returns:
        for each subnet an int64 tensor of units, ascending, so that one subnet alone is the whole.
    """
    # manual_seed takes 32 bits of what it is given, and Python's hash differs between processes.
    number = zlib.crc32(f"{seed}/{round_index}/{name}".encode())
    order = torch.randperm(units, generator=torch.Generator().manual_seed(number))
    return [piece.sort().values for piece in order.split(list(sizes(units, num_subnets)))]
