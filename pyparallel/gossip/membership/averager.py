"""A gossip algorithm whose members come and go: one epoch of rounds after another."""

import os
import signal
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

# No public names, which mypy asks for.
from typing_extensions import override

from ...comm import Collectives, PeerError, Run
from ...comm.failures import is_of_backend
from ...training import FlatBuckets, ModelAverager, Status, Traits
from ..algorithms import SGP
from .base import Change, Membership
from .decision import Epoch, name_of
from .epochs import Epochs
from .group import EpochGroup, gather_accounts
from .ledger import Account, Settlement, settle
from .moves import move_mass
from .rounds import AcknowledgedRounds

_NUM_EPOCHS_KEPT = 64  # in the ledger, of members that have not settled them yet


class ElasticAverager(ModelAverager):
    """SGP or D-PSGD in epochs, of whatever members there are.

    An epoch ends for a rank when communication fails, or when the membership reports a change; the
    rank then disconnects, so that the others' rounds fail too. All that are left make a group in
    the same processes and settle: messages that were not merged come back to their senders. Members
    that join have weight 0, and are filled by one member each.

    Args:
        membership: opened here.
        make: returns the algorithm for a number of members.
        config: (name, value) pairs that members must share.
        module: frozen parameters and buffers are sent to members that join.
    """

    traits = Traits(can_be_inner=False, has_fixed_ranks=False)

    def __init__(
        self,
        membership: Membership,
        make: Callable[[int], SGP],
        config: Sequence[tuple[str, str]],
        module: nn.Module,
        buckets: FlatBuckets,
        run: Run,
    ) -> None:
        super().__init__(buckets.buffers, run)
        self._membership, self._make = membership, make
        trainable = {id(each) for each in buckets.parameters}
        frozen = [each for each in module.parameters() if id(each) not in trainable]
        self._others = [*frozen, *module.buffers()]
        self._group = EpochGroup()
        self._epochs = Epochs(membership, self._group.server, config)
        self._account = Account()
        self._epoch: Epoch | None = None
        self._rounds: AcknowledgedRounds | None = None
        self._failure: str | None = None  # that has ended the epoch
        self._is_terminated = False
        self._handler: Any = None
        try:
            self._change("the trainer begins")
        except BaseException:
            self.close()
            raise
        if membership.leaves_on_sigterm:
            own = weakref.WeakMethod(self._terminate)
            with suppress(ValueError):  # not in the main thread, where no handler can be set
                self._handler = signal.signal(
                    signal.SIGTERM, lambda *_: (method := own()) and method()
                )

    @property
    def members(self) -> tuple[str, ...]:
        """The names of the members, by rank."""
        return () if self._epoch is None else tuple(map(name_of, self._epoch.members))

    @property
    def epoch(self) -> int:
        """The number of the epoch."""
        return 0 if self._epoch is None else self._epoch.number

    @property
    @override
    def status(self) -> Status:
        return self._current.status

    @override
    def restore_debiased(self) -> None:
        if self._rounds is not None:
            self._rounds.restore_debiased()

    @override
    def before_step(self) -> None:
        with self._surviving():
            self._current.await_receipts()

    @override
    def before_update(self) -> None:
        self._current.before_update()

    @override
    def after_update(self) -> None:
        self._current.after_update()

    @override
    def step_buckets(self, step_bucket: Callable[..., None], num_buckets: int) -> None:
        self.before_step()
        self._current.step_buckets(step_bucket, num_buckets)
        if self.run.counts.synchronizes:
            self.after_step()

    @override
    def after_step(self) -> None:
        """Take a round; or begin another epoch instead, on all members alike."""
        self._failure = self._failure or self._epochs.should_change
        if self._failure is None:
            with self._surviving():
                self._current.after_step()
        if self._failure is not None:
            self._change(self._failure)
        if self._is_terminated:
            self.leave()
            os.kill(os.getpid(), signal.SIGTERM)  # to what handled it before

    @override
    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        return self._current.as_merged()

    @override
    def reset(self) -> None:
        self._current.reset()

    def leave(self) -> None:
        """Send all of (x, w) to a member that stays, once the others are between two rounds.

        This rank's parameters stay as they are. If no other member is left, or all leave together,
        there is nobody to send to.
        """
        if len(self.members) > 1:
            self._change(self._failure or f"{self._membership.name} leaves", leaves=True)
            self._end_group()
            self._epochs.end(self._membership.deadline)
        self.close()

    @override
    def close(self) -> None:
        self._epochs.close()
        if self._handler is not None:
            with suppress(ValueError):
                signal.signal(signal.SIGTERM, self._handler)
        self._handler = None
        self._end_group()
        self._rounds = None

    @property
    def _current(self) -> AcknowledgedRounds:
        assert self._rounds is not None
        return self._rounds

    def _terminate(self) -> None:
        self._is_terminated = True

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Communicate inside; an error ends the epoch for this rank, and not the run."""
        try:
            yield
        except PeerError as error:
            self._failure = str(error)

    @torch.no_grad()
    def _change(self, reason: str, *, leaves: bool = False) -> None:
        """Begin the next epoch that its members can begin together, or leave in it."""
        left: list[str] = []
        while True:
            self._end_group()
            epoch = self._epochs.next(leaves=leaves)
            left += [each for each in epoch.before if each not in epoch.members]
            self._failure = None
            try:
                settlement = self._begin(epoch)
            except RuntimeError as error:
                if not (isinstance(error, PeerError) or is_of_backend(error)):
                    raise
                continue
            if leaves:
                return
            if not epoch.leaving:
                break
            reason = f"{', '.join(sorted(map(name_of, epoch.leaving)))} left"
        if set(epoch.before) == set(epoch.members) and "imed out" in reason:
            reason += (
                f"; all members are alive: deadline, {self._membership.deadline:g} s, must be "
                "longer than every step"
            )
        joined = [each for each in epoch.members if each not in epoch.veterans]
        before = settlement.total + settlement.lost
        returned = settlement.returned[self._epochs.identity] / before if before else 0.0
        change = Change(
            epoch.number,
            self.members,
            tuple(map(name_of, joined)),
            tuple(dict.fromkeys(map(name_of, left))),
            settlement.lost / before if before else 0.0,
            returned,
            reason,
        )
        self._report(change)

    def _report(self, change: Change) -> None:
        if self._membership.on_change is not None:
            self._membership.on_change(change)
            return
        lost = f"; {change.lost:.3%} of the push-sum mass was lost with them" if change.lost else ""
        left = f"; without {', '.join(change.left)}{lost}" if change.left else ""
        warnings.warn(
            f"{self._membership.name}: epoch {change.epoch} of {', '.join(change.members)} begins "
            f"({change.reason}){left}",
            stacklevel=2,
        )

    def _end_group(self) -> None:
        """Disconnect and destroy the group; what was sent stays, until it is settled."""
        if self._rounds is not None:
            self._rounds.restore_debiased()
            self._rounds.release()
        self._group.end()

    def _begin(self, epoch: Epoch) -> Settlement:
        """Make the group, settle, and fill the members that join."""
        self._epoch = epoch
        self._group.begin(epoch, self._epochs.identity, self._membership.deadline)
        self.run.regroup()
        if self._epochs.identity not in epoch.veterans:
            self._account = Account()
        accounts = gather_accounts(self._account, epoch)
        settlement = settle(accounts, epoch.veterans)
        if settlement.total == 0:
            settlement = self._start_fresh()
        scale = len(epoch.members) / settlement.total
        self._apply(settlement, scale)
        return settlement

    def _apply(self, settlement: Settlement, scale: float) -> None:
        """Take what this rank has in the new epoch, and fill the members that join."""
        assert self._epoch is not None
        own, epoch, last = self._epochs.identity, self._epoch, self._rounds
        returned = settlement.returned[own]
        kept = dict(list(self._account.merged.items())[-_NUM_EPOCHS_KEPT:])
        account = Account(
            weight=settlement.weights[own] - returned,
            exponent=settlement.exponent,
            merged=kept,
            settled=epoch.number,
            total=settlement.total,
        )
        algorithm = self._make(len(epoch.members))
        rounds = AcknowledgedRounds(
            self.buffers, self.run, algorithm.topology, epoch.members, account, epoch.number, scale
        )
        if returned:
            assert last is not None
            rounds.merge_returned(last.sent_messages, returned * scale)
        self._account, self._rounds = account, rounds
        self.run.barrier()  # before it a rank might have mass that another one takes back
        has_mass = [settlement.weights[each] > 0 for each in epoch.members]
        leaving = [each in epoch.leaving for each in epoch.members]
        neighbors = move_mass(self.run.rank, has_mass, leaving)
        if neighbors is not None:
            if not all(has_mass):
                rounds.copy_tensors(self._others, neighbors)
            rounds.take(neighbors)
            rounds.await_receipts()

    def _start_fresh(self) -> Settlement:
        """Broadcast the first rank's tensors; return that all members have the weight 1."""
        assert self._epoch is not None
        collectives = Collectives(self.run)
        for tensor in [*self.buffers, *self._others]:
            collectives.broadcast_(tensor, 0)
        self.run.barrier()
        members = self._epoch.members
        weights, nothing = dict.fromkeys(members, 1.0), dict.fromkeys(members, 0.0)
        return Settlement(0, weights, nothing, float(len(members)), 0.0)
