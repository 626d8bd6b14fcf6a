"""AD-PSGD of members that come and go: an average that only one rank of a pair took is undone."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

# No public names, which mypy asks for.
from typing_extensions import override

from ...comm import Run
from ...training import FlatBuckets, Traits
from ..algorithms import ADPSGD
from ..algorithms.pair_messages import Reply
from ..algorithms.pairwise import PairwiseAverager
from ..messages import NeighborExchange
from ..topology import Neighbors
from .decision import Epoch
from .members import MembersAverager, Shares, copy_tensors, gather_from_members
from .moves import move_mass
from .outer_members import Progress, find_sources


class PairMembers(MembersAverager):
    """Asynchronous averages of pairs, of which both members take their half, or neither does.

    The passive member of a pair adds d / 2 when it replies, and the active one subtracts d / 2 when
    it applies the reply. If an epoch ends in between, the passive one subtracts what it has added:
    members tell each other the requests whose replies they have not applied. If the active one is
    gone, d / 2 stays: part of what that has learned.

    A member that joins has a copy of another one's parameters. One that leaves sends its own to
    another one, which takes the average of both.

    Args:
        make: returns the algorithm for a number of members.
    """

    traits = Traits(has_equal_steps=False)
    inner: PairwiseAverager | None

    def __init__(
        self, make: Callable[[int], ADPSGD], module: nn.Module, buckets: FlatBuckets, run: Run
    ) -> None:
        super().__init__(buckets, module, run)
        self._make = make
        self._members: Sequence[str] = ()  # of the epoch of ``inner``
        self._num_steps = self._num_requests = 0
        self._unapplied: int | None = None  # request of the last epoch
        self._replies: dict[str, Reply] = {}  # of the last epoch that are kept, by active member
        self._averaged: list[str] = []  # members that leave, whose parameters this rank has
        self._is_filled = self._is_behind = False

    @override
    def count_step(self) -> None:
        self._num_steps += 1

    @override
    def close(self) -> None:
        self.release()

    @override
    def release(self) -> None:
        """Release what keeps the group's connections; exchanges stay until they are settled."""
        if self.inner is None:
            return
        self._num_requests, self._unapplied = self.inner.num_requests, self.inner.unapplied
        kept = self.inner.unacknowledged.items()
        self._replies = {self._members[rank]: reply for rank, reply in kept}
        self.inner.close()
        self.inner.exchange.failed.clear()
        self.inner = None

    @override
    def forget(self) -> None:
        self._is_behind, self._unapplied, self._replies = True, None, {}

    @override
    def begin(self, epoch: Epoch, identity: str) -> Shares:
        self.run.regroup(compares_steps=False)
        is_member = self._is_filled and not self._is_behind and identity in epoch.veterans
        state = [self._unapplied, self._averaged]
        own = Progress(is_member, self._is_filled, self._num_steps, False, state)
        members = gather_from_members(own, epoch.members)
        found = {member: Progress(*each) for member, each in members.items()}
        for active, reply in self._replies.items():
            if active in found and found[active].state[0] == reply.request_index:
                for buffer, difference in zip(self.buffers, reply.difference, strict=True):
                    buffer.sub_(difference, alpha=0.5)
        self._replies = {}
        self.run.barrier()  # before it another one may not have learned what was not applied
        self._unapplied = None
        self._move(epoch, found)
        made = self._make(len(epoch.members))
        self._members = epoch.members
        self.inner = made.start_pairs(
            self.buffers, self.run, num_requests=self._num_requests, keeps_replies=True
        )
        return Shares()

    def _move(self, epoch: Epoch, found: dict[str, Progress]) -> None:
        """Average with members that leave, or fill those that join."""
        are_filled = find_sources(list(found.values()), are_equal=False)
        leaving = [each in epoch.leaving for each in epoch.members]
        if not epoch.leaving:
            self._averaged = []
        averaged = {leaver for each in found.values() for leaver in each.state[1]}
        sends = [
            is_filled and member not in averaged
            for is_filled, member in zip(are_filled, epoch.members, strict=True)
        ]
        neighbors = move_mass(self.run.rank, sends, leaving)
        if neighbors is not None and (neighbors.out_peers or neighbors.in_peers):
            exchange = NeighborExchange(self.run)
            pairs = zip(are_filled, leaving, strict=True)
            if epoch.leaving and any(is_filled and not leaves for is_filled, leaves in pairs):
                self._average(exchange, neighbors)
            else:
                self._is_filled = self._is_filled and not neighbors.in_peers
                copy_tensors(exchange, [*self.buffers, *self.others], neighbors)
            self._averaged += [epoch.members[peer] for peer in neighbors.in_peers if leaving[peer]]
        if are_filled[self.run.rank] or (neighbors is not None and neighbors.in_peers):
            self._is_filled, self._is_behind = True, False

    def _average(self, exchange: NeighborExchange, neighbors: Neighbors) -> None:
        """Send the parameters to another rank, or average with all that are received."""
        sent = self.buffers if neighbors.out_peers else []
        into = [[torch.empty_like(each) for each in self.buffers] for _ in neighbors.in_peers]
        received = exchange.swap(sent, neighbors.out_peers, neighbors.in_peers, into=into).wait()
        for number, message in enumerate(received.messages, start=2):
            for buffer, each in zip(self.buffers, message, strict=True):
                buffer.lerp_(each, 1 / number)
