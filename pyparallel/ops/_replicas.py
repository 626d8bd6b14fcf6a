"""Checks of replicas: copies of de-biased parameters that an op writes in the same pass as z."""

from collections.abc import Sequence
from itertools import combinations

from torch import Tensor

from ._checks import check_like, describe, has_memory


def check_replicas(names: Sequence[str], replicas: Sequence[Tensor], z: Tensor) -> None:
    """Raise unless all are buffers of z's length, dtype and device, apart from z and each other.

    Raises:
        ValueError: names the replica, and the tensor with which it shares memory.
    """
    numel, dtype, device = z.numel(), z.dtype, z.device
    for name, replica in zip(names, replicas, strict=True):
        fits = replica.numel() == numel and replica.dtype == dtype and replica.dim() == 1
        if not (fits and replica.is_contiguous() and replica.device == device):
            check_like(name, replica, "z", z)
            raise ValueError(
                f"{name} must be of z's dtype ({describe(z)}), got {describe(replica)}"
            )
    if not has_memory(z):
        return
    nbytes, begins = z.nbytes, [z.data_ptr()]
    for replica in replicas:
        begin = replica.data_ptr()
        for other in begins:
            if -nbytes < begin - other < nbytes:
                _refuse_overlap({"z": z, **dict(zip(names, replicas, strict=True))})
        begins.append(begin)


def _refuse_overlap(tensors: dict[str, Tensor]) -> None:
    for (name, tensor), (other_name, other) in combinations(tensors.items(), 2):
        common = tensor.nbytes - abs(tensor.data_ptr() - other.data_ptr())
        if common > 0:
            raise ValueError(f"{other_name} must not overlap {name}, got {common} bytes in common")
