"""One flat bucket of parameters with the optimizer's state of them."""

from collections.abc import Sequence
from itertools import groupby
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..training import FlatBuckets
from ..training.arguments import require
from ..training.shards import like, local_of

STEP = "step"
MASTER = "master_param"  # as in TransformerEngine
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

    ``optimizer.state`` holds an entry per parameter, as torch's do; each of its tensors is a view
    of the buffer of that name, or an element of step counts. A step reads and writes ``stepped``:
    the parameters, or with ``master_weights`` their float32 copies, which are such a state.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: int,
        weights: FlatBuckets,
        index: int,
        *,
        master_weights: bool = False,
    ) -> None:
        self.group = group
        self.values = self.stepped = weights.buffers[index]
        self.has_masters = master_weights and self.values.dtype != torch.float32
        inside = [
            (parameter, segment.offset)
            for parameter, segment in zip(weights.parameters, weights.segments, strict=True)
            if segment.bucket == index
        ]
        self.parameters: list[Tensor] = [parameter for parameter, _ in inside]
        self.offsets = [offset for _, offset in inside]
        self._gradients: Gradients | None = None
        self._stepped: list[int] = []  # which parameters had a gradient when they were collected
        self._optimizer = optimizer
        self._strides = list(map(Tensor.stride, self._tensors))
        self._addresses = list(map(Tensor.data_ptr, self._tensors))  # 0 if empty
        self._begin = self.values.data_ptr()
        self.num_taken = 0  # tensors of others that have become views, or have gone
        self._is_contiguous = all(map(Tensor.is_contiguous, self._tensors))
        self.drop_state()

    def drop_state(self) -> None:
        """Allocate the states again when they are needed next, from those of the optimizer."""
        self._flat: dict[str, Tensor] = {}
        self._views: dict[str, list[Tensor]] = {}
        self._entered: dict[str, list[Tensor | None]] = {}  # what the optimizer has of each
        self._spans: list[Span] | None = None
        self._known: list[tuple[float, int]] = []  # equal where step counts are, as far as known
        self._version = -1  # of the counts that these are of
        self._versions: list[int] | None = None  # of the parameters that the masters follow

    @property
    def _tensors(self) -> list[Tensor]:
        """What the buffer holds of each parameter: it, or this rank's shard of it."""
        return list(map(local_of, self.parameters))

    def is_in_place(self) -> bool:
        """Return whether all parameters still are the views that they were made."""
        addresses = list(map(Tensor.data_ptr, self._tensors))
        if addresses != self._addresses:
            # The whole buffer moves when it is sent to another process, into shared memory.
            distance = self.values.data_ptr() - self._begin
            if addresses != [address and address + distance for address in self._addresses]:
                return False
            self._addresses, self._begin = addresses, self._begin + distance
        return list(map(Tensor.stride, self._tensors)) == self._strides

    def collect_gradients(self) -> None:
        """Collect the gradients of the parameters that have one; copy only strided ones."""
        found = [parameter.grad for parameter in self.parameters]
        tensors = [local_of(gradient) for gradient in found if gradient is not None]
        offsets, stepped = self.offsets, self._tensors
        self._stepped = [index for index, gradient in enumerate(found) if gradient is not None]
        if len(tensors) < len(found):
            offsets = [offsets[index] for index in self._stepped]
            stepped = [stepped[index] for index in self._stepped]
        for gradient in tensors:
            if gradient.layout != torch.strided:
                raise RuntimeError(
                    "gradients must be dense for pyparallel.optim, got one of layout "
                    f"{gradient.layout} for a parameter of shape {list(gradient.shape)}; use "
                    "torch.optim.SGD or SparseAdam"
                )
        if not (self._is_contiguous and all(map(Tensor.is_contiguous, tensors))):
            tensors = list(map(_in_memory_order, tensors, stepped))
        if not all(map(Tensor.numel, tensors)):  # of empty shards
            pairs = zip(tensors, offsets, strict=True)
            filled = [(tensor, offset) for tensor, offset in pairs if tensor.numel()]
            tensors, offsets = [each for each, _ in filled], [offset for _, offset in filled]
        are_followed = self.has_masters and self._versions == self._parameter_versions()
        # Autograd sees that tensors saved for a backward have changed, as of torch's optimizers.
        torch.autograd.graph.increment_version(stepped)
        self._versions = self._parameter_versions() if are_followed else None
        self._gradients = Gradients(tensors, offsets)

    def take_gradients(self) -> Gradients:
        """Return the collected gradients, once."""
        gradients, self._gradients = self._gradients, None
        assert gradients is not None, "a bucket is stepped once within a step"
        return gradients

    def update_masters(self) -> None:
        """Take over into the masters what others have written into the parameters, at first all."""
        if not self.has_masters:
            return
        (self.stepped,) = self.state(MASTER)
        versions = self._parameter_versions()
        if self._versions != versions:
            is_same = self.stepped.to(self.values.dtype) == self.values
            self.stepped.copy_(torch.where(is_same, self.stepped, self.values))
            self._versions = versions

    def state(self, *names: str) -> list[Tensor]:
        """Return the flat buffers of these states; zero for parameters that do not have them.

        Tensors of others, as from ``load_state_dict``, are replaced by views.
        """
        # Not state[parameter]: the defaultdict would create an empty entry.
        get = self._optimizer.state.get
        entries = [get(parameter, _NO_STATE) for parameter in self.parameters]
        for name in names:
            found = [entry.get(name) for entry in entries]
            if name not in self._flat:
                self._allocate(name, found)
            entered = self._entered[name]
            if not all(map(is_, found, entered)):
                if self._dtype_of(name, found) != self._flat[name].dtype:
                    self._allocate(name, found)
                    entered = self._entered[name]
                for index, (new, old) in enumerate(zip(found, entered, strict=True)):
                    if new is not old:
                        self._take(name, index, new)
        return [self._flat[name] for name in names]

    def flat(self, name: str) -> Tensor:
        """Return the flat buffer of a state that ``state`` has returned before."""
        return self._flat[name]

    def views(self, name: str) -> list[Tensor]:
        """Return each parameter's view of a state that ``state`` has returned before."""
        return self._views[name]

    def has(self, name: str, index: int) -> bool:
        """Return whether the optimizer has a state that ``state`` has returned."""
        return self._entered[name][index] is not None

    def has_all(self, name: str) -> bool:
        """Return whether it has this state of all parameters."""
        return all(map(is_, self._entered[name], self._views[name]))

    def publish(self, *names: str, of: Sequence[int] | None = None) -> None:
        """Enter states that ``state`` has returned, of the parameters that have a gradient.

        Or ``of`` those with these indices.
        """
        state = self._optimizer.state
        for name in names:
            views, entered = self._views[name], self._entered[name]
            for index in self._stepped if of is None else of:
                if entered[index] is None:
                    state[self.parameters[index]][name] = entered[index] = views[index]

    def split(self, keys: Sequence[object]) -> list[Span]:
        """Return the spans of neighbors with equal keys, one key for each parameter."""
        firsts = [next(run) for _, run in groupby(range(len(keys)), keys.__getitem__)]
        begins = [0, *(self.offsets[first] for first in firsts[1:])]
        ends = [*begins[1:], self.values.numel()]
        return [Span(*each) for each in zip(begins, ends, firsts, strict=True)]

    def count_step(self, found_inf: Tensor | None = None) -> None:
        """Count a step of parameters with a gradient; take it back if ``found_inf`` is not 0."""
        counts = self._flat[STEP]
        one = 1 if found_inf is None else -(found_inf != 0).to(counts)
        known = self._known_counts()
        if len(self._stepped) < len(known):
            stepped = set(self._stepped)
            has = [index in stepped for index in range(len(known))]
            # Of pageable memory, which a copy that does not block has read when it returns.
            one = torch.tensor(has, device="cpu").to(counts, non_blocking=True) * one
            pairs = zip(known, has, strict=True)
            if found_inf is None:
                self._known = [(count + plus, kind) for (count, kind), plus in pairs]
            else:  # the host does not know whether they are taken back
                kinds: dict[Any, int] = {}
                self._known = [(0, kinds.setdefault(pair, len(kinds))) for pair in pairs]
            self._spans = None
        counts += one
        self._version = counts._version

    def spans(self) -> list[Span]:
        """Return the spans of parameters with equally many steps, as far as the host knows."""
        known = self._known_counts()
        if self._spans is None:
            self._spans = self.split(known)
        return self._spans

    def step_count(self, span: Span) -> Tensor:
        """Return the step count of a span, which is a step's index, as a 0-d float64 tensor."""
        count = self._views[STEP][span.first].to(torch.float64)
        # 0: never stepped, only mixed.
        return count if len(self._stepped) == len(self.parameters) else count.clamp(min=1)

    def clear_without_gradient(self, name: str) -> None:
        """Set a state to zero where a parameter has no gradient."""
        stepped = set(self._stepped)
        for index, view in enumerate(self._views[name]):
            if index not in stepped:
                local_of(view).zero_()

    @torch.inference_mode(False)
    def _allocate(self, name: str, found: list[Tensor | None]) -> None:
        self._entered[name] = [None] * len(found)
        if name == STEP:
            counts = torch.zeros(len(found), dtype=torch.float32, device=self.values.device)
            self._flat[name] = counts
            self._known, self._version = [(0, 0)] * len(found), counts._version
            self._views[name] = [counts[index] for index in range(len(found))]
            return
        flat = self._flat[name] = torch.zeros_like(self.values, dtype=self._dtype_of(name, found))
        tensors = self._tensors
        views = [
            flat.as_strided(tensor.size(), tensor.stride(), offset)
            for tensor, offset in zip(tensors, self.offsets, strict=True)
        ]
        self._views[name] = list(map(like, self.parameters, views))

    def _dtype_of(self, name: str, found: list[Tensor | None]) -> torch.dtype:
        """Return the dtype of a state's buffer: of what the optimizer has, or the parameters'."""
        if self.has_masters or name == STEP:
            return torch.float32
        return next((entry.dtype for entry in found if entry is not None), self.values.dtype)

    def _known_counts(self) -> list[tuple[float, int]]:
        """Return what is known of the step counts, after a read if others have written them."""
        counts = self._flat[STEP]
        if counts._version != self._version:
            self._known = [(count, 0) for count in counts.tolist()]
            self._version, self._spans = counts._version, None
        return self._known

    def _parameter_versions(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]

    @torch.no_grad()
    def _take(self, name: str, index: int, found: Any) -> None:
        """Take over what the optimizer's state of a parameter now is: another tensor, or none."""
        entry = self._views[name][index]
        view, found = local_of(entry), local_of(found)
        self._versions = None
        self.num_taken += 1
        fits = not isinstance(found, Tensor) or found.numel() == view.numel()
        require(fits, f"state {name!r} must have the parameter's shape {list(view.shape)}", found)
        if found is None:
            view.zero_()
            self._entered[name][index] = None
        else:
            view.copy_(torch.as_tensor(found, device=view.device))
            self._optimizer.state[self.parameters[index]][name] = entry
            self._entered[name][index] = entry


def _in_memory_order(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient as a contiguous tensor in the order of the parameter's memory."""
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_strided(
            parameter.size(), parameter.stride(), dtype=gradient.dtype, device=gradient.device
        ).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))
