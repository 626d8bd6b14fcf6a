"""Outer steps, as of DiLoCo, LocalSGD and NoLoCo, of members that come and go."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# No public names, which mypy asks for.
from typing_extensions import override

from ...comm import Run
from ...compression.state_store import StateStore
from ...training import FlatBuckets
from ..algorithms import DiLoCo, LocalSGD, NoLoCo
from ..algorithms.periodic import PeriodicAverager
from ..messages import NeighborExchange
from ..messages.averages import Pairs
from .decision import Epoch
from .members import MembersAverager, Shares, bind, copy_tensors, gather_from_members
from .moves import move_mass


class Progress(NamedTuple):
    """What a process says when an epoch begins.

    Args:
        is_member: it was one of the epoch before, and has what its members have.
        is_filled: it has what members of an earlier epoch had.
        num_taken: outer steps.
        is_interrupted: the next one is due.
        state: what a process that it fills receives, as ``encode`` returns it.
    """

    is_member: bool
    is_filled: bool
    num_taken: int
    is_interrupted: bool
    state: Any


class OuterStepMembers(MembersAverager):
    """Local steps, and outer steps of all members.

    An outer step is taken by all members of an epoch. If one fails in it, some of the others may
    have taken it: they fill the rest, whose weights are in the average. If nobody has, the members
    of the next epoch take it. A process that joins is filled by a member: with its weights, and the
    state of its outer optimizer. What error feedback holds stays where it is.

    NoLoCo's are taken in pairs. A member that is interrupted in one takes it alone, as one without
    a partner does; those that have taken fewer then count as many as the others, so that all draw
    the same pairs. What compressors hold is forgotten.

    Args:
        algorithm: for any number of members.
        start: returns the averager of outer steps, in the run's group.
    """

    inner: PeriodicAverager

    def __init__(
        self,
        algorithm: LocalSGD | DiLoCo | NoLoCo,
        start: Callable[[], PeriodicAverager],
        module: nn.Module,
        buckets: FlatBuckets,
        run: Run,
    ) -> None:
        super().__init__(buckets, module, run)
        self._algorithm, self._start = algorithm, start
        self._has_started = self._is_filled = self._is_behind = False
        self._before: StateStore | None = None  # the compressor's, before the outer step

    @override
    def forget(self) -> None:
        self._is_behind = True

    @override
    def count_step(self) -> None:
        self.inner.count_step()
        self.is_interrupted = self.inner.num_steps % self._algorithm.interval == 0

    @override
    def after_step(self) -> None:
        """Take the outer step if it is due; after a PeerError it still is."""
        if self.is_interrupted:
            store = self.inner.store
            self._before = None if store is None else store.copy(self.run.rank, self.run.size)
            self.inner.take_outer_steps()
            self.is_interrupted, self._before = False, None

    @override
    def begin(self, epoch: Epoch, identity: str) -> Shares:
        self.run.regroup(compares_steps=False)
        if not self._has_started:
            self.inner, self._has_started = self._start(), True
        if self.is_interrupted and not self._algorithm.averages_over_all:
            self.inner.regroup(None, None, Pairs(NeighborExchange(self.run), matching=None))
            self.after_step()
        pairs = bind(self._algorithm, len(epoch.members)).start_averages(self.run)
        state, tensors = encode(self.inner.state_to_fill())
        is_member = self._is_filled and not self._is_behind and identity in epoch.veterans
        num_taken = (self.inner.num_steps - self.is_interrupted) // self._algorithm.interval
        own = Progress(is_member, self._is_filled, num_taken, self.is_interrupted, state)
        found = [Progress(*member) for member in gather_from_members(own, epoch.members).values()]
        sources = find_sources(found, are_equal=pairs is None)
        neighbors = move_mass(self.run.rank, sources, [False] * len(found))
        store, received = self._before or self.inner.store, None
        if neighbors is not None:
            if neighbors.in_peers:
                self._is_filled = False
                source = found[neighbors.in_peers[0]]
                received, tensors = decode(source.state)
                store = self.inner.store  # what this rank sent before is in the average
            live = [*self.buffers, *self.others, *tensors]
            copy_tensors(NeighborExchange(self.run), live, neighbors)
            if neighbors.in_peers:
                self.is_interrupted = source.is_interrupted
        self.inner.regroup(store, received, pairs)
        num_taken = (self.inner.num_steps - self.is_interrupted) // self._algorithm.interval
        most = max(each.num_taken for each, fills in zip(found, sources, strict=True) if fills)
        self.inner.skip_outer_steps(most - num_taken)
        self._is_filled, self._is_behind, self._before = True, False, None
        return Shares()


def find_sources(found: Sequence[Progress], are_equal: bool) -> list[bool]:
    """Return whether each member has what it goes on from, and fills those that have not.

    If all are to be equal, those are the members that have taken the most outer steps, otherwise
    all. Without any member it is the process that has taken the most, as all have other weights; at
    the beginning the first.
    """
    most = max((each.num_taken for each in found if each.is_member), default=None)
    if most is not None:
        return [each.is_member and (each.num_taken == most or not are_equal) for each in found]
    order = [(each.is_filled, each.num_taken) for each in found]
    return [rank == order.index(max(order)) for rank in range(len(found))]


def encode(value: Any) -> tuple[Any, list[Tensor]]:
    """Return a state as JSON has it, and its tensors, the live ones."""
    tensors: list[Tensor] = []

    def convert(part: Any) -> Any:
        if isinstance(part, Tensor):
            tensors.append(part)
            return {"tensor": [list(part.shape), str(part.dtype).removeprefix("torch.")]}
        if isinstance(part, dict):
            return {"dict": [[key, convert(each)] for key, each in part.items()]}
        return [convert(each) for each in part] if isinstance(part, (list, tuple)) else part

    return convert(value), tensors


def decode(encoded: Any) -> tuple[Any, list[Tensor]]:
    """Return a state that was encoded, with tuples as lists and new tensors, and its tensors."""
    tensors: list[Tensor] = []

    def convert(part: Any) -> Any:
        if isinstance(part, list):
            return [convert(each) for each in part]
        if not isinstance(part, dict):
            return part
        if "dict" in part:
            return {key: convert(each) for key, each in part["dict"]}
        shape, dtype = part["tensor"]
        tensors.append(torch.empty(shape, dtype=getattr(torch, dtype), device="cpu"))
        return tensors[-1]

    return convert(encoded), tensors
