"""A number that tells batches apart, for ranks that must be given the same one."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_MOST = 1024  # entries of a tensor that are read
# Of the weighted magnitudes: ranks may compute one target with other kernels, as of a teacher.
_TOLERANCE = 1e-3
_WEIGHTS = 1 + np.arange(_MOST) * 0.6180339887 % 1


class BatchDigest:
    """A weighted sum of entries of a batch's tensors; 0.0 if there are none, or of nan.

    Of a tensor at most 1,024 entries are read. Tensors of a device make the host wait.
    """

    def __init__(self, batch: Any) -> None:
        self.value = self._scale = 0.0
        # In NumPy: each operation of torch would take several microseconds of a small step.
        leaves = [batch] if isinstance(batch, Tensor) else tree_leaves(batch)
        for index, leaf in enumerate(leaves, 1):
            has_values = isinstance(leaf, Tensor) and leaf.layout is torch.strided
            if has_values and not leaf.is_meta:
                entries = _sample(leaf)
                weights = _WEIGHTS[: len(entries)] * index
                self.value += float(entries @ weights)
                self._scale += float(np.abs(entries) @ weights)

    def differs_from(self, value: float) -> bool:
        """Return whether another rank's value is of other entries; no if one is not known."""
        return 0.0 not in (value, self.value) and abs(value - self.value) > _TOLERANCE * self._scale


def _sample(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return at most 1,024 entries, of all samples where these are not more, as float64."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    for dim in reversed(range(tensor.dim())):
        if tensor.numel() > _MOST:
            step = min(tensor.shape[dim], -(-tensor.numel() // _MOST))
            tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
    return tensor.to("cpu", torch.float64).numpy().reshape(-1)
