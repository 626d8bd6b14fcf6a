"""What all subnets have whole: averaged when they are merged."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .members import Members

_LOW_BITS = 27  # of a float64's 53


@torch.no_grad()
def average(tensors: Sequence[Tensor], members: Members) -> list[Tensor]:
    """The average of each floating-point tensor over all ranks, in its dtype; one rank's own.

    Sums have twice the bits, so that the average of equal numbers is that number.
    """
    if members.size == 1:
        return list(tensors)
    averages: dict[int, Tensor] = {}
    for itemsize, mean in _MEANS.items():
        chosen = [i for i, tensor in enumerate(tensors) if tensor.dtype.itemsize == itemsize]
        if chosen:
            flat = mean([tensors[i].reshape(-1) for i in chosen], members)
            pieces = flat.split([tensors[i].numel() for i in chosen])
            for i, piece in zip(chosen, pieces, strict=True):
                averages[i] = piece.view(tensors[i].shape).to(tensors[i].dtype)
    return [averages[i] for i in range(len(tensors))]


def _mean_of_halves(tensors: list[Tensor], members: Members) -> Tensor:
    return _reduced(torch.cat([tensor.float() for tensor in tensors]), members)


def _mean(tensors: list[Tensor], members: Members) -> Tensor:
    return _reduced(torch.cat([tensor.double() for tensor in tensors]), members)


def _mean_wide(tensors: list[Tensor], members: Members) -> Tensor:
    """There is no wider dtype: each number as two, of half the bits."""
    flat = torch.cat(tensors)
    high = flat.view(torch.int64).bitwise_and(-(1 << _LOW_BITS)).view(torch.float64)
    low = (flat - high).nan_to_num_(nan=0.0)  # of infinities
    means = _reduced(torch.stack([high, low]), members)
    return means[0] + means[1]


def _reduced(flat: Tensor, members: Members) -> Tensor:
    members.sum_(flat)
    return flat.div_(members.size)


# By the bytes of a number.
_MEANS: dict[int, Callable[[list[Tensor], Members], Tensor]] = {
    2: _mean_of_halves,
    4: _mean,
    8: _mean_wide,
}
