"""The weights of a stage, in the versions that its policy reads.

Parameters are views of flat buffers. In a forward or backward they point into the buffers of the
version that the policy returns for it. A tensor that autograd has saved in the forward is replaced
in the backward if its memory is in the buffers of another version, by the same view of the
backward's. So every operation, a Linear or ``x @ w``, reads the same version. (Swapping
``parameter.data`` alone would mix them: some operations save a view of the old memory, others the
parameter.)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ...training import FlatBuckets
from ..messages.refusals import StepRefusedError
from ..prediction.base import WeightPredictor
from ..schedules.versions import VersionCounters, Versions, WeightVersion
from .weight_copies import VersionKey, WeightCopies, WeightCopy, unchanged


class Weights(Protocol):
    """The weights of one stage, as its forwards, backwards and optimizer use them."""

    last_read: VersionKey | None = None

    @property
    def peak_copies(self) -> int:
        """Return the most copies of the weights held at once, the live ones included."""

    def take_last_read(self) -> VersionKey | None:
        """Return the version that was the last to be read since the last call, or None."""
        found, self.last_read = self.last_read, None
        return found

    def forward(self, microbatch: int) -> AbstractContextManager[VersionKey]:
        """Return a context for the forward of a microbatch; it yields the version read."""

    def backward(self, microbatch: int) -> AbstractContextManager[VersionKey]:
        """Return a context for each part of a microbatch's backward; it yields the version read."""

    def end_backward(self, microbatch: int) -> None:
        """Mark the backward of a microbatch as complete."""
        return

    def update(self) -> None:
        """Step the optimizer."""

    def skip_update(self) -> None:
        """Count an update that leaves the weights as they are."""

    def restart(self, policy: Versions) -> None:
        """Count versions and microbatches from 0 again, with the pipeline empty."""

    def restore_live(self) -> None:
        """Point the parameters at the live weights, wherever a failure has left them."""
        return


class LiveWeights(Weights):
    """The live weights, for schedules without an update between a forward and its backward."""

    peak_copies = 1

    def __init__(self, weight_predictor: WeightPredictor | None) -> None:
        self._weight_predictor = weight_predictor
        self._version = 0

    @override
    def forward(self, microbatch: int) -> AbstractContextManager[VersionKey]:
        self.last_read = VersionKey(self._version, 0)
        return nullcontext(self.last_read)

    backward = forward

    @override
    def update(self) -> None:
        self._begin_version()
        if self._weight_predictor is not None:
            self._weight_predictor.step()

    @override
    def skip_update(self) -> None:
        self._begin_version()
        if self._weight_predictor is not None:
            self._weight_predictor.skip()

    def _begin_version(self) -> None:
        self.last_read = VersionKey(self._version, 0)
        self._version += 1

    @override
    def restart(self, policy: Versions) -> None:
        self._version = 0


class StageWeights(Weights):
    """The live weights of a stage, stashed versions that are still read, and predicted ones.

    ``update_index`` returns how many updates come before the one of a microbatch's gradient.
    A forward predicts what it reads, so with the learning rate of the next update. Optimizers
    ``in_update`` have predicted it in the pass of their update, and the forward predicts again only
    if they, their state, weights, or what is frozen have changed since. None: all forwards predict.
    """

    def __init__(
        self,
        weights: Sequence[FlatBuckets],
        weight_predictor: WeightPredictor,
        policy: Versions,
        stage: int,
        update_index: Callable[[int], int],
        in_update: Sequence[Optimizer] = (),
    ) -> None:
        self._weights = weights
        self._in_update = in_update
        self._memory = WeightCopies(weights)
        self._live = self._memory.current
        self._weight_predictor = weight_predictor
        self._policy = policy
        self._stage = stage
        self._update_index = update_index
        self._copies: dict[VersionKey, WeightCopy] = {}
        self._free: list[WeightCopy] = []
        self._prefetched: VersionKey | None = None  # predicted for the next forward
        self._predicted_from: list[Any] = []
        self._pending: dict[int, VersionCounters] = {}
        self._first_forwards: dict[int, int] = {}  # by update
        self._version = 0
        self._next_microbatch = 0

    @property
    @override
    def peak_copies(self) -> int:
        return 1 + len(self._copies) + len(self._free)

    @override
    @contextmanager
    def forward(self, microbatch: int) -> Iterator[VersionKey]:
        counters = self._counters_of(microbatch)
        self._pending[microbatch] = counters
        self._next_microbatch = microbatch + 1
        key = self.last_read = _key_of(self._policy.forward(counters, self._stage))
        prefetched = self._prefetched
        is_prefetched = key == prefetched and key in self._copies
        if is_prefetched and self._predicted_from != self._read_by_predictions():
            self._free.append(self._copies.pop(key))
        self._prefetched = None
        self._memory.point_to(self._copy(key))
        try:
            with self._replacing_weights(counters, key):
                yield key
        except StepRefusedError:  # the microbatch comes again
            del self._pending[microbatch]
            self._next_microbatch, self._prefetched = microbatch, prefetched
            raise
        finally:
            self._memory.point_to(self._live)
        self._free_unread()

    @override
    @contextmanager
    def backward(self, microbatch: int) -> Iterator[VersionKey]:
        counters = self._pending[microbatch]._replace(backward=self._version)
        key = self.last_read = _key_of(self._policy.backward(counters, self._stage))
        self._memory.point_to(self._copy(key))
        try:
            yield key
        finally:
            self._memory.point_to(self._live)

    @override
    def end_backward(self, microbatch: int) -> None:
        del self._pending[microbatch]
        self._free_unread()

    @override
    def update(self) -> None:
        delayed = self._version >= self._policy.synchronous_updates
        self._begin_version()
        key = self._next_forward_key()
        if key.version == self._version and key.horizon and self._in_update:
            self._weight_predictor.step(key.horizon, self._allocate(key), delayed)
            self._leave_out_frozen(key)
            self._prefetched, self._predicted_from = key, self._read_by_predictions()
        else:
            self._weight_predictor.step(delayed=delayed)

    @override
    def skip_update(self) -> None:
        self._begin_version()
        self._weight_predictor.skip()

    def _begin_version(self) -> None:
        """Count an update, and stash what is still to be read of the weights before it."""
        for each in self._weights:
            each.check(each.parameters)
        previous = self.last_read = VersionKey(self._version, 0)
        self._version += 1
        still_read = self._still_read()
        if previous in still_read:
            for copy, live in zip(self._allocate(previous), self._live.buffers, strict=True):
                copy.copy_(live)
        for key in still_read.difference(self._copies):
            if key.version == previous.version and key.horizon:
                self._predict(key)
        self._free_unread()

    @override
    def restart(self, policy: Versions) -> None:
        if self._pending:
            raise RuntimeError(f"microbatches {sorted(self._pending)} are still in the pipeline")
        self._policy = policy
        self._version = self._next_microbatch = 0
        self._first_forwards.clear()
        for key in list(self._copies):
            self._free.append(self._copies.pop(key))

    @override
    def restore_live(self) -> None:
        self._memory.restore(self._live)

    def _counters_of(self, microbatch: int) -> VersionCounters:
        update = self._update_index(microbatch)
        if update not in self._first_forwards:
            kept = {k: v for k, v in self._first_forwards.items() if k >= update - 1}
            self._first_forwards = kept
        first_forward = self._first_forwards.setdefault(update, self._version)
        return VersionCounters(self._version, self._version, update, first_forward)

    def _next_forward_key(self) -> VersionKey:
        update = self._update_index(self._next_microbatch)
        first_forward = self._first_forwards.get(update, self._version)
        counters = VersionCounters(self._version, self._version, update, first_forward)
        return _key_of(self._policy.forward(counters, self._stage))

    def _still_read(self) -> set[VersionKey]:
        """Return the keys that are still to be read, of copies and of the version before now."""
        keys = {self._next_forward_key()}
        for counters in self._pending.values():
            now, later = (
                _key_of(self._policy.backward(counters._replace(backward=version), self._stage))
                for version in (self._version, self._version + 1)
            )
            # A key that changes with the live weights is predicted from them at the backward.
            if now == later:
                keys.add(now)
        # The versions that forwards read ascend.
        oldest = self._next_forward_key()
        if not oldest.horizon:
            keys.update(VersionKey(version, 0) for version in range(oldest.version, self._version))
        return keys

    def _free_unread(self) -> None:
        if not self._copies:
            return
        still_read = self._still_read()
        for key in [copy for copy in self._copies if copy not in still_read]:
            self._free.append(self._copies.pop(key))

    def _allocate(self, key: VersionKey) -> Sequence[Tensor]:
        # In a drain a backward runs before the next forward.
        if not self._free and self._prefetched in self._copies:
            self._free.append(self._copies.pop(self._prefetched))
        if not self._free:
            self._free.append(self._memory.allocate())
        self._copies[key] = self._free.pop()
        return self._copies[key].buffers

    def _copy(self, key: VersionKey) -> WeightCopy:
        if key == (self._version, 0):
            return self._live
        if key not in self._copies:
            if key.version != self._version:
                raise RuntimeError(f"stage {self._stage} holds no weights of {key}")
            self._predict(key)
        return self._copies[key]

    def _predict(self, key: VersionKey) -> None:
        self._weight_predictor.predict(key.horizon, self._allocate(key))
        self._leave_out_frozen(key)

    def _read_by_predictions(self) -> list[Any]:
        """Return what tells whether a prediction would be another one now."""
        found: list[Any] = []
        for optimizer in self._in_update:
            for group in optimizer.param_groups:
                found += [_stamp(value) for name, value in group.items() if name != "params"]
                for parameter in group["params"]:
                    found += parameter._version, parameter.requires_grad
                    found += map(_stamp, optimizer.state.get(parameter, {}).values())
        return found

    def _leave_out_frozen(self, key: VersionKey) -> None:
        """Predict that parameters which were frozen after some steps stay as they are."""
        parameters = (parameter for each in self._weights for parameter in each.parameters)
        views = self._copies[key].views, self._live.views
        for parameter, predicted, live in zip(parameters, *views, strict=True):
            if not parameter.requires_grad:
                predicted.copy_(live)

    def _replacing_weights(
        self, counters: VersionCounters, key: VersionKey
    ) -> AbstractContextManager[object]:
        """Replace saved weights in the backward, if it may read another version."""
        now = (self._version, 0)
        backward = _key_of(self._policy.backward(counters, self._stage))
        if key == backward == now and counters.update == self._version:
            return nullcontext()  # the next update comes after the backward: as on the last stage
        return torch.autograd.graph.saved_tensors_hooks(unchanged, self._memory.in_current)


def _key_of(version: WeightVersion) -> VersionKey:
    return VersionKey(int(version.version), int(version.horizon))


def _stamp(value: Any) -> Any:
    """Return a value, or of a tensor what tells whether it is another one or has been written."""
    return (id(value), value._version) if isinstance(value, Tensor) else value
