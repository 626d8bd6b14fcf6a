"""The weights of a stage, in as many versions as its policy reads, without copying a stage around.

Parameters are views of flat buffers. In a pass they point into the buffers of the version that the
policy gives it. What autograd saves of them in the forward is remembered by its place in the
buffers, and looked up in the backward in the version that the policy gives that: whatever the
operation, a Linear or ``x @ w``, it reads one and the same version. (To swap ``parameter.data``
alone would mix them: some operations save a view of the old memory, others the parameter.)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...comm import FlatBuckets
from ..prediction.base import WeightPredictor
from ..schedules.versions import VersionCounters, Versions
from ..schedules.versions import WeightVersion as ReadingOfAny


class WeightVersion(NamedTuple):
    """What one pass reads: a version, and how many updates it is predicted ahead."""

    version: int
    horizon: int


class Weights(Protocol):
    """The weights of one stage, as its passes and its optimizer see them."""

    @property
    def peak_copies(self) -> int:
        """The most copies of the weights there have been at once, the live ones included."""

    def forward(self, microbatch: int) -> AbstractContextManager[WeightVersion]:
        """The forward of a microbatch runs in this; yields what it reads."""

    def backward(self, microbatch: int) -> AbstractContextManager[WeightVersion]:
        """Each part of the backward of a microbatch runs in this; yields what it reads."""

    def end_backward(self, microbatch: int) -> None:
        """No part of this microbatch's backward is left."""

    def update(self) -> None:
        """Step the optimizer."""

    def restart(self) -> None:
        """The pipe is empty: count versions and microbatches from 0 again."""


class LiveWeights:
    """For schedules that never update between a forward and its backward.

    Args:
        foresight: steps the optimizer; None: the stage has nothing to train.
    """

    peak_copies = 1

    def __init__(self, weight_predictor: WeightPredictor | None) -> None:
        self._weight_predictor = weight_predictor
        self._version = 0

    def forward(self, microbatch: int) -> AbstractContextManager[WeightVersion]:
        """Nothing needs to change."""
        return nullcontext(WeightVersion(self._version, 0))

    backward = forward

    def end_backward(self, microbatch: int) -> None:
        """Nothing has been kept."""

    def update(self) -> None:
        """Step the optimizer."""
        self._version += 1
        if self._weight_predictor is not None:
            self._weight_predictor.step()

    def restart(self) -> None:
        """Count versions from 0 again."""
        self._version = 0


@dataclass(frozen=True)
class _Place:
    """Where in the flat buffers a saved tensor lies."""

    buffer: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    conjugate: bool = False  # what views may be besides
    negative: bool = False


class _Copy:
    """One copy of the weights: flat buffers, and what each parameter is when it points here."""

    def __init__(self, buffers: Sequence[Tensor], places: Sequence[_Place]) -> None:
        self.buffers = buffers
        self.views = [self.at(place) for place in places]
        self._index = {buffer.untyped_storage().data_ptr(): i for i, buffer in enumerate(buffers)}

    def place_of(self, tensor: Tensor) -> _Place | None:
        """Where a tensor lies in here; None: it does not."""
        index = self._index.get(tensor.untyped_storage().data_ptr())
        if index is None:
            return None
        offset = tensor.storage_offset()
        kind = tensor.dtype, tensor.size(), tensor.stride()
        return _Place(index, *kind, offset, tensor.is_conj(), tensor.is_neg())

    def at(self, place: _Place) -> Tensor:
        """What lies at a place in here."""
        buffer = self.buffers[place.buffer]
        if place.dtype != buffer.dtype:
            buffer = buffer.view(place.dtype)
        found = buffer.as_strided(place.size, place.stride, place.offset)
        found = found.conj() if place.conjugate else found
        return torch._neg_view(found) if place.negative else found


class StageWeights:
    """The live weights of a stage, older ones that are still read, and predicted ones.

    Args:
        weights: one for each parameter group of the stage's optimizer.
        foresight: steps the optimizer and predicts.
        policy: which version each pass reads.
        stage: the stage's index.
        update_index: how many updates come before the one that takes a microbatch's gradient.
    """

    def __init__(
        self,
        weights: Sequence[FlatBuckets],
        weight_predictor: WeightPredictor,
        policy: Versions,
        stage: int,
        update_index: Callable[[int], int],
    ) -> None:
        self._weights = weights
        self._parameters = [parameter for each in weights for parameter in each.parameters]
        flat = _Copy([buffer for each in weights for buffer in each.buffers], [])
        self._places = [_place_in(flat, parameter) for parameter in self._parameters]
        self._live = _Copy(flat.buffers, self._places)
        self._weight_predictor = weight_predictor
        self._policy = policy
        self._stage = stage
        self._update_index = update_index
        self._current = self._live
        self._copies: dict[WeightVersion, _Copy] = {}
        self._free: list[_Copy] = []
        self._ahead: WeightVersion | None = None  # predicted for the next forward
        self._pending: dict[int, VersionCounters] = {}
        self._leaders: dict[int, int] = {}
        self._version = 0
        self._next_microbatch = 0

    @property
    def peak_copies(self) -> int:
        """The most copies of the weights there have been at once, the live ones included."""
        return 1 + len(self._copies) + len(self._free)

    @contextmanager
    def forward(self, microbatch: int) -> Iterator[WeightVersion]:
        """The forward of a microbatch runs in this; yields what it reads."""
        seen = self._seen_now(microbatch)
        self._pending[microbatch] = seen
        self._next_microbatch = microbatch + 1
        reading = _plain(self._policy.forward(seen, self._stage))
        self._ahead = None
        with self._reading(reading), self._remembering(seen, reading):
            yield reading
        self._drop_unread()

    @contextmanager
    def backward(self, microbatch: int) -> Iterator[WeightVersion]:
        """Each part of the backward of a microbatch runs in this; yields what it reads."""
        seen = self._pending[microbatch]._replace(backward=self._version)
        reading = _plain(self._policy.backward(seen, self._stage))
        with self._reading(reading):
            yield reading

    def end_backward(self, microbatch: int) -> None:
        """No part of this microbatch's backward is left."""
        del self._pending[microbatch]
        self._drop_unread()

    def update(self) -> None:
        """Step the optimizer; keep the weights from before it for those who still read them."""
        for each in self._weights:
            each.check(each.parameters)
        overtaken = WeightVersion(self._version, 0)
        self._version += 1
        if overtaken in self._read_from_now():
            for copy, live in zip(self._take(overtaken), self._live.buffers, strict=True):
                copy.copy_(live)
        self._drop_unread()
        reading = self._next_reading()
        if reading.version == self._version and reading.horizon:
            self._weight_predictor.step(reading.horizon, self._take(reading))
            self._ahead = reading
        else:
            self._weight_predictor.step()

    def restart(self) -> None:
        """The pipe is empty: count versions and microbatches from 0 again."""
        if self._pending:
            raise RuntimeError(f"microbatches {sorted(self._pending)} are still in the pipe")
        self._version = self._next_microbatch = 0
        self._leaders.clear()
        for reading in list(self._copies):
            self._free.append(self._copies.pop(reading))

    def _seen_now(self, microbatch: int) -> VersionCounters:
        update = self._update_index(microbatch)
        if update not in self._leaders:
            self._leaders = {k: v for k, v in self._leaders.items() if k >= update - 1}
        first_forward = self._leaders.setdefault(update, self._version)
        return VersionCounters(self._version, self._version, update, first_forward)

    def _next_reading(self) -> WeightVersion:
        """What the next forward would read if it came now."""
        update = self._update_index(self._next_microbatch)
        first_forward = self._leaders.get(update, self._version)
        seen = VersionCounters(self._version, self._version, update, first_forward)
        return _plain(self._policy.forward(seen, self._stage))

    def _read_from_now(self) -> set[WeightVersion]:
        """What is still to be read of all that there is, or that an update is about to overtake."""
        read = {self._next_reading()}
        for seen in self._pending.values():
            now, later = (
                _plain(self._policy.backward(seen._replace(backward=version), self._stage))
                for version in (self._version, self._version + 1)
            )
            # What moves on with the live weights is predicted from them when its time has come.
            if now == later:
                read.add(now)
        # The versions that forwards read ascend.
        oldest = self._next_reading()
        if not oldest.horizon:
            read.update(
                WeightVersion(version, 0) for version in range(oldest.version, self._version)
            )
        return read

    def _drop_unread(self) -> None:
        read = self._read_from_now()
        for reading in [each for each in self._copies if each not in read]:
            self._free.append(self._copies.pop(reading))

    def _take(self, reading: WeightVersion) -> Sequence[Tensor]:
        """The buffers for a copy: of one that is read no more, if there is one."""
        if not self._free and self._ahead in self._copies:  # a backward comes first, in a drain
            self._free.append(self._copies.pop(self._ahead))
        if not self._free:
            room = [torch.zeros_like(buffer) for buffer in self._live.buffers]
            self._free.append(_Copy(room, self._places))
        self._copies[reading] = self._free.pop()
        return self._copies[reading].buffers

    def _copy(self, reading: WeightVersion) -> _Copy:
        if reading == (self._version, 0):
            return self._live
        if reading not in self._copies:
            if reading.version != self._version:
                raise RuntimeError(f"stage {self._stage} has not kept weights for {reading}")
            self._weight_predictor.predict(reading.horizon, self._take(reading))
        return self._copies[reading]

    @contextmanager
    def _reading(self, reading: WeightVersion) -> Iterator[None]:
        self._point_to(self._copy(reading))
        try:
            yield
        finally:
            self._point_to(self._live)

    def _remembering(
        self, seen: VersionCounters, reading: WeightVersion
    ) -> AbstractContextManager[object]:
        """What is saved of the weights is looked up in the backward, if it may differ then."""
        now = (self._version, 0)
        backward = _plain(self._policy.backward(seen, self._stage))
        if reading == backward == now and seen.update == self._version:
            return nullcontext()  # the next update comes after the backward: as on the last stage
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _point_to(self, copy: _Copy) -> None:
        if copy is not self._current:
            torch.clear_autocast_cache()  # of casts that belong to the parameters' old contents
            for parameter, view in zip(self._parameters, copy.views, strict=True):
                parameter.data = view
            self._current = copy

    def _pack(self, tensor: Tensor) -> Tensor | _Place:
        place = self._current.place_of(tensor) if tensor.layout == torch.strided else None
        return tensor if place is None else place

    def _unpack(self, saved: Tensor | _Place) -> Tensor:
        return saved if isinstance(saved, Tensor) else self._current.at(saved)


def _place_in(copy: _Copy, parameter: Tensor) -> _Place:
    place = copy.place_of(parameter)
    assert place is not None, "FlatBuckets makes parameters views of its buffers"
    return place


def _plain(reading: ReadingOfAny) -> WeightVersion:
    """With plain integers, so that readings are keys."""
    return WeightVersion(int(reading.version), int(reading.horizon))
