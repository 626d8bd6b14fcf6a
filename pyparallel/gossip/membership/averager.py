"""A gossip algorithm whose members come and go: one epoch after another."""

import os
import signal
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

# No public names, which mypy asks for.
from typing_extensions import override

from ...comm import PeerError
from ...comm.failures import is_of_backend
from ...training import ModelAverager, Traits
from .base import Change, Membership
from .decision import Epoch, name_of
from .epochs import Epochs
from .group import EpochGroup
from .members import MembersAverager, Shares


class ElasticAverager(ModelAverager):
    """An algorithm in epochs, of whatever members there are.

    An epoch ends for a rank when communication fails, or when the membership reports a change; the
    rank then disconnects, so that the others' communication fails too. All that are left make a
    group in the same processes, in which the algorithm begins the next epoch.

    Args:
        inner: the algorithm.
        membership: opened here.
        config: (name, value) pairs that members must share.
    """

    traits = Traits(has_fixed_ranks=False)
    inner: MembersAverager

    def __init__(
        self, inner: MembersAverager, membership: Membership, config: Sequence[tuple[str, str]]
    ) -> None:
        super().__init__(inner.buffers, inner=inner)
        self._membership = membership
        self._group = EpochGroup()
        self._epochs = Epochs(membership, self._group.server, config)
        self._epoch: Epoch | None = None
        self._failure: str | None = None  # that has ended the epoch
        self._is_terminated = False
        self._handler: Any = None
        try:
            self._change("the trainer begins")
            if inner.is_interrupted:
                self._take()
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

    @override
    def before_step(self) -> None:
        with self._surviving():
            super().before_step()

    @override
    def step_buckets(self, step_bucket: Callable[..., None], num_buckets: int) -> None:
        self.before_step()
        self.inner.step_buckets(step_bucket, num_buckets)
        if self.run.counts.synchronizes:
            self.after_step()

    @override
    def after_step(self) -> None:
        """Communicate; or begin another epoch instead, on all members alike."""
        self.inner.count_step()
        self._take()
        if self._is_terminated:
            self.leave()
            os.kill(os.getpid(), signal.SIGTERM)  # to what handled it before

    @override
    def flush(self) -> None:
        with self._surviving():
            super().flush()

    @override
    def as_evaluated(self) -> tuple[list[Tensor], Tensor]:
        return self.inner.as_evaluated()

    def leave(self) -> None:
        """Leave once the others are between two steps.

        SGP sends all of (x, w) to one of them, which merges it. This rank's parameters stay as they
        are. If no other member is left, or all leave together, there is nobody to send to.
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
        super().close()

    def _take(self) -> None:
        """Take a round, or an outer step, in as many epochs as that needs."""
        while True:
            self._failure = self._failure or self._epochs.should_change
            if self._failure is None:
                with self._surviving():
                    self.inner.after_step()
            if self._failure is None:
                return
            self._change(self._failure)
            if not self.inner.is_interrupted:
                return

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
                shares = self._begin(epoch)
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
        joined = [member for member in epoch.members if member not in epoch.veterans]
        change = Change(
            epoch.number,
            self.members,
            tuple(map(name_of, joined)),
            tuple(dict.fromkeys(map(name_of, left))),
            *shares,
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
        """Disconnect and destroy the group."""
        self.inner.release()
        self._group.end()

    def _begin(self, epoch: Epoch) -> Shares:
        """Make the group, in which the algorithm begins the epoch."""
        self._epoch = epoch
        own, epochs = self._epochs.identity, self._epochs
        if own not in epoch.veterans:  # as of now: without a group it is one of the next epoch's
            self.inner.forget()
        self._group.begin(epoch, own, self._membership.deadline, lambda: epochs.should_change)
        return self.inner.begin(epoch, own)
