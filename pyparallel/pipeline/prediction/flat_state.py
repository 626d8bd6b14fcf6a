"""The state of an optimizer in flat buffers, so that one op serves all parameters."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...optim.bucket import Bucket
from ...training import FlatBuckets

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class FlatState:
    """State tensors such as ``exp_avg``, in flat buffers like the weights of a parameter group."""

    def __init__(self, optimizer: Optimizer, weights: FlatBuckets) -> None:
        numbers = range(len(weights.buffers))
        self._buckets = [Bucket(optimizer, 0, weights, index) for index in numbers]
        self._parameters = weights.parameters

    @property
    def num_changes(self) -> int:
        """How many tensors were taken over from the optimizer, or from a state that it loaded."""
        return sum(bucket.num_taken for bucket in self._buckets)

    def buffers(self, name: str) -> list[Tensor]:
        """Return the flat buffers of a state name; zero for parameters that do not have it."""
        return [buffer for bucket in self._buckets for buffer in bucket.state(name)]

    def views(self, name: str) -> list[Tensor]:
        """Return views of these buffers, one for each parameter, in its shape."""
        views: dict[int, Tensor] = {}
        for bucket in self._buckets:
            bucket.state(name)
            views.update(zip(map(id, bucket.parameters), bucket.views(name), strict=True))
        return [views[id(parameter)] for parameter in self._parameters]

    def publish(self, name: str, parameters: Sequence[nn.Parameter]) -> None:
        """Put a state of our own into the optimizer's, so that it is saved with it."""
        chosen = set(map(id, parameters))
        for bucket in self._buckets:
            owners = enumerate(bucket.parameters)
            bucket.publish(name, of=[index for index, each in owners if id(each) in chosen])


def check_dtypes(weights: Sequence[FlatBuckets]) -> None:
    """Raise a ValueError unless the ops of prediction support the dtypes of the weights."""
    for dtype in {buffer.dtype for each in weights for buffer in each.buffers}.difference(_DTYPES):
        raise ValueError(
            "parameters must, for weight prediction, be float32, float64, bfloat16 or float16, "
            f"got {str(dtype).removeprefix('torch.')}; convert the layers"
        )
