"""The state of an optimizer in flat buffers, so that one op serves all parameters."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...training import FlatBuckets

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class FlatState:
    """State tensors such as ``exp_avg``, in flat buffers like the weights of a parameter group.

    torch updates its state in place, so its tensors can be views of flat buffers; new ones, of a
    first step or ``load_state_dict``, are copied to new buffers.
    """

    def __init__(self, optimizer: Optimizer, weights: FlatBuckets) -> None:
        self._optimizer = optimizer
        self._weights = weights
        self._buffers: dict[str, list[Tensor]] = {}
        self._views: dict[str, list[Tensor]] = {}
        self._entries: dict[str, list[Tensor | None]] = {}
        self.num_layouts = 0

    def buffers(self, name: str) -> list[Tensor]:
        """Return the flat buffers of a state name; zero for parameters that do not have it."""
        # Not state[parameter]: the defaultdict would create an empty state.
        state_of = self._optimizer.state.get
        entries = [state_of(each, {}).get(name) for each in self._weights.parameters]
        known = self._entries.get(name)
        if known is None or any(a is not b for a, b in zip(entries, known, strict=True)):
            self._lay_out(name, entries)
        return self._buffers[name]

    def views(self, name: str) -> list[Tensor]:
        """Return views of these buffers, one for each parameter, in its shape."""
        self.buffers(name)
        return self._views[name]

    def publish(self, name: str, parameters: Sequence[nn.Parameter]) -> None:
        """Put a state of our own into the optimizer's, so that it is saved with it."""
        chosen = {id(parameter) for parameter in parameters}
        for index, parameter in enumerate(self._weights.parameters):
            if id(parameter) in chosen:
                view = self._views[name][index]
                self._optimizer.state[parameter][name] = self._entries[name][index] = view

    def _lay_out(self, name: str, entries: list[Tensor | None]) -> None:
        self.num_layouts += 1
        segments = self._weights.segments
        dtypes = {
            segment.bucket: entry.dtype
            for segment, entry in zip(segments, entries, strict=True)
            if entry is not None
        }
        self._buffers[name] = [
            torch.zeros_like(buffer, dtype=dtypes.get(bucket))
            for bucket, buffer in enumerate(self._weights.buffers)
        ]
        self._views[name] = self._weights.views(self._buffers[name])
        self._entries[name] = [None] * len(entries)
        for view, entry in zip(self._views[name], entries, strict=True):
            if entry is not None:
                view.copy_(entry)
        owners = zip(self._weights.parameters, entries, strict=True)
        self.publish(name, [parameter for parameter, entry in owners if entry is not None])


def check_dtypes(weights: Sequence[FlatBuckets]) -> None:
    """Raise a ValueError unless the ops of prediction support the dtypes of the weights."""
    for dtype in {buffer.dtype for each in weights for buffer in each.buffers}.difference(_DTYPES):
        raise ValueError(
            "parameters must, for weight prediction, be float32, float64, bfloat16 or float16, "
            f"got {str(dtype).removeprefix('torch.')}; convert the layers"
        )
