"""Values that the host reads of a GPU, without waiting for later work."""

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor in the host's memory, enqueued at once behind what computes the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._event = tensor, None  # of a GPU when the copy is done
        if tensor.is_cuda:
            shape, dtype = tensor.shape, tensor.dtype
            self._tensor = torch.empty(shape, dtype=dtype, pin_memory=True, device="cpu")
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.current_stream(tensor.device).record_event()

    def values(self) -> list[float]:
        """Return the elements; the host waits for the copy, and for no later work."""
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = self._tensor.view(-1).tolist()
        return values


def host_values(*copies: HostCopy) -> list[float]:
    """Return the elements of copies, one after the other; the host waits for them all at once."""
    return [value for copy in copies for value in copy.values()]
