"""One flat bucket of parameters with the optimizer's state of them."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..comm import FlatBuckets

STEP = "step"
_NO_STATE: dict[str, Any] = {}


class Gradients(NamedTuple):
    """The gradients of a bucket: contiguous tensors, and where each begins in the flat buffers."""

    tensors: list[Tensor]
    offsets: list[int]

    def within(self, begin: int, end: int) -> "Gradients":
        """Return those of the elements from ``begin`` to ``end``, counted from ``begin``."""
        pairs = zip(self.tensors, self.offsets, strict=True)
        inside = [(tensor, offset - begin) for tensor, offset in pairs if begin <= offset < end]
        return Gradients([tensor for tensor, _ in inside], [offset for _, offset in inside])


class Span(NamedTuple):
    """Elements ``begin`` to ``end`` of a bucket, which start with parameter number ``first``."""

    begin: int
    end: int
    first: int


class Bucket:
    """A flat buffer of parameters of one group and dtype, and their state in buffers alike.

    ``optimizer.state`` holds an entry per parameter, as those of torch's optimizers do; each of its
    tensors is a view of the bucket's buffer of that name, or an element of its step counts.

    Args:
        optimizer: owner of the state.
        group: index of the parameter group.
        weights: of that group.
        index: of the bucket among its buffers.
    """

    def __init__(self, optimizer: Optimizer, group: int, weights: FlatBuckets, index: int) -> None:
        self.group = group
        self.values = weights.buffers[index]
        inside = [
            (parameter, segment.offset)
            for parameter, segment in zip(weights.parameters, weights.segments, strict=True)
            if segment.bucket == index
        ]
        self.parameters = [parameter for parameter, _ in inside]
        self.offsets = [offset for _, offset in inside]
        self.spans: list[Span] | None = None  # of equal step counts; None: not known
        self._gradients: Gradients | None = None
        self._optimizer = optimizer
        self._is_contiguous = all(parameter.is_contiguous() for parameter in self.parameters)
        self._flat: dict[str, Tensor] = {}
        self._views: dict[str, list[Tensor]] = {}
        self._published: dict[str, set[int]] = {}  # which parameters the optimizer has it of

    def collect_gradients(self) -> None:
        """Collect the gradients of the parameters that have one; copy only strided ones.

        Raises:
            RuntimeError: one is sparse, or their dtypes differ.
        """
        tensors: list[Tensor] = []
        offsets: list[int] = []
        for parameter, offset in zip(self.parameters, self.offsets, strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse or (tensors and gradient.dtype is not tensors[0].dtype):
                raise RuntimeError(
                    "gradients must be dense and of one dtype for pyparallel.optim, got one of "
                    f"{gradient.dtype} and {gradient.layout} for a parameter of shape "
                    f"{list(parameter.shape)}; use torch.optim.SGD or SparseAdam"
                )
            if not (self._is_contiguous and gradient.is_contiguous()):
                gradient = _in_memory_order(gradient, parameter)
            tensors.append(gradient)
            offsets.append(offset)
        self._gradients = Gradients(tensors, offsets)

    def take_gradients(self) -> Gradients:
        """Return the collected gradients, once."""
        gradients, self._gradients = self._gradients, None
        assert gradients is not None, "a bucket is stepped once within a step"
        return gradients

    def state(self, *names: str) -> list[Tensor]:
        """Return the flat buffers of these states; zero for parameters that do not have them.

        Tensors that others have put into the optimizer's state, such as ``load_state_dict``, are
        copied into the buffers and replaced by views of them.
        """
        for name in names:
            if name not in self._flat:
                self._allocate(name)
        views, state = [self._views[name] for name in names], self._optimizer.state
        for index, parameter in enumerate(self.parameters):
            # Not state[parameter]: the defaultdict would create an empty entry.
            entry = state.get(parameter, _NO_STATE)
            for name, of_name in zip(names, views, strict=True):
                found = entry.get(name)
                if found is not of_name[index]:
                    self._take(name, index, found)
        return [self._flat[name] for name in names]

    def flat(self, name: str) -> Tensor:
        """Return the flat buffer of a state that ``state`` has returned before."""
        return self._flat[name]

    def has(self, name: str, index: int) -> bool:
        """Return whether the optimizer has a state that ``state`` has returned."""
        return index in self._published[name]

    def has_all(self, name: str) -> bool:
        """Return whether it has this state of all parameters."""
        return len(self._published[name]) == len(self.parameters)

    def publish(self, *names: str) -> None:
        """Enter states that ``state`` has returned, of the parameters that have a gradient."""
        state = self._optimizer.state
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                for name in names:
                    state[parameter][name] = self._views[name][index]
                    self._published[name].add(index)

    def split(self, keys: Sequence[object]) -> list[Span]:
        """Return the spans of neighbors with equal keys, one key for each parameter."""
        firsts = [next(run) for _, run in groupby(range(len(keys)), keys.__getitem__)]
        begins = [0, *(self.offsets[first] for first in firsts[1:])]
        ends = [*begins[1:], self.values.numel()]
        return [Span(*each) for each in zip(begins, ends, firsts, strict=True)]

    def has_gradients(self, like: Tensor) -> Tensor:
        """Return for each parameter 1 or 0: whether it has a gradient, in a tensor's dtype."""
        has = [parameter.grad is not None for parameter in self.parameters]
        return torch.tensor(has, dtype=like.dtype, device=like.device)

    def clear_without_gradient(self, name: str) -> None:
        """Set a state to zero where a parameter has no gradient."""
        for view, parameter in zip(self._views[name], self.parameters, strict=True):
            if parameter.grad is None:
                view.zero_()

    def _allocate(self, name: str) -> None:
        self._published[name] = set()
        if name == STEP:
            counts = torch.zeros(len(self.parameters), dtype=torch.float32, device=self._place())
            self._flat[name] = counts
            self._views[name] = [counts[index] for index in range(len(counts))]
            return
        state = self._optimizer.state
        entries = [state.get(parameter, {}).get(name) for parameter in self.parameters]
        dtype = next((entry.dtype for entry in entries if entry is not None), None)
        flat = self._flat[name] = torch.zeros_like(self.values, dtype=dtype)
        self._views[name] = [
            flat.as_strided(parameter.size(), parameter.stride(), offset)
            for parameter, offset in zip(self.parameters, self.offsets, strict=True)
        ]

    def _place(self) -> torch.device:
        """Return where step counts are: where torch's optimizers have them."""
        group = self._optimizer.param_groups[self.group]
        on_device = group.get("capturable") or group.get("fused")
        return self.values.device if on_device else torch.device("cpu")

    @torch.no_grad()
    def _take(self, name: str, index: int, found: Any) -> None:
        """Take over what the optimizer's state of a parameter now is: another tensor, or none."""
        view, published = self._views[name][index], self._published[name]
        if found is not None:
            view.copy_(torch.as_tensor(found))
            self._optimizer.state[self.parameters[index]][name] = view
            published.add(index)
        elif index in published:
            view.zero_()
            published.remove(index)
        else:
            return
        self.spans = None


def _in_memory_order(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient as a contiguous tensor in the order of the parameter's memory."""
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_strided(
            parameter.size(), parameter.stride(), dtype=gradient.dtype, device=gradient.device
        ).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))
