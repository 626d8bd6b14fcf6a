"""This process in the epochs of a `Membership`, whose service a thread polls."""

import hashlib
import json
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from threading import Condition, Thread

# No public name, which mypy asks for.
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exports

from ...comm import first_difference
from .base import Membership
from .decision import OTHER_CONFIG, Decision, Epoch, Statement, decide, name_of
from .lighthouse import new_identity

_POLL_SECONDS, _SHORT_SECONDS = 0.2, 0.02  # between two polls; while others wait
_SILENCE_SECONDS = 5.0  # of the service, after which it is reported
_GRACE_SECONDS = 2.0  # for which fewer than half of the members wait for the others
_NAME_SECONDS = 3.0  # for which a process waits until another one of its name is known to be dead
_CONFIG_KEY = "config"


@dataclass(eq=False)
class Epochs:
    """This process in the epochs of a membership, whose service a thread polls.

    Args:
        membership: opened here.
        store: of this process.
        config: (name, value) pairs that members must share.
    """

    membership: Membership
    store: TCPStore
    config: Sequence[tuple[str, str]]
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        self.identity = new_identity(self.membership.name)
        host = self.membership.open(self.identity)
        text = json.dumps(self.config)
        self.store.set(_CONFIG_KEY, text)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        self._statement = Statement((host, self.store.port), digest)
        self._changed = Condition()
        self._next: Epoch | None = None
        self._problem: str | None = None
        self._other: tuple[str, int] | None = None  # the address of a member, if there is one
        self._should_change: str | None = None
        self._is_hurried = self._is_closed = self._is_left = False
        self._answered = self._ready_since = time.monotonic()
        self._thread = Thread(target=self._watch, name="membership", daemon=True)
        self._thread.start()

    @property
    def should_change(self) -> str | None:
        """Why this rank should leave its epoch between two rounds, or None."""
        return self._should_change

    def next(self, *, leaves: bool = False) -> Epoch:
        """Leave the epoch, and wait until all that are alive have; return the next one.

        ``leaves``: for good. A ValueError if this process cannot be a member, which others are not
        concerned by.
        """
        with self._changed:
            self._statement = replace(self._statement, is_ready=True, leaves=leaves)
            self._next, self._ready_since = None, time.monotonic()
            self._changed.notify_all()
            has_warned = False
            while self._next is None:
                if self._problem is not None:
                    raise ValueError(self._describe_problem())
                self._changed.wait(1.0)
                silence = time.monotonic() - self._answered
                if silence > _SILENCE_SECONDS and not has_warned:
                    has_warned = True
                    warnings.warn(
                        f"{self.membership.name}: the membership's service has not responded for "
                        f"{silence:.0f} s, without which members cannot change; waiting for it"
                        f"{self.membership.hint}",
                        stacklevel=2,
                    )
            epoch, self._next, self._should_change = self._next, None, None
            return epoch

    def end(self, seconds: float) -> None:
        """Take part until the others go on without this process, at most for some seconds."""
        with self._changed:
            self._statement = replace(self._statement, is_gone=True)
            self._is_hurried = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_left, seconds)

    def close(self) -> None:
        """End the thread, and be alive no more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()  # a thread that is in another language must not outlive Python
        self.membership.close()

    def _describe_problem(self) -> str:
        """Return why this process is refused; of another configuration, the first difference."""
        assert self._problem is not None
        assert self._other is not None
        if self._problem != OTHER_CONFIG:
            return self._problem
        timeout = timedelta(seconds=self.membership.deadline)
        store = TCPStore(*self._other, is_master=False, timeout=timeout)
        theirs, own = (
            [(name, value) for name, value in json.loads(text)]
            for text in (store.get(_CONFIG_KEY), json.dumps(self.config))
        )
        what, there, here = first_difference(theirs, own) or ("configuration", "one", "another")
        return (
            f"a process that joins must have the members' {what}, {there}, got {here}; they go on "
            "without it"
        )

    def _watch(self) -> None:
        while not self._is_closed:
            published = self._statement
            texts = self.membership.poll(published.to_text())
            with self._changed:
                if texts is not None:
                    self._answered = time.monotonic()
                    self._read(published, {key: Statement.parse(t) for key, t in texts.items()})
                hurries = self._is_hurried or self._statement.is_ready
                if published.is_ready == self._statement.is_ready:
                    self._changed.wait(_SHORT_SECONDS if hurries else _POLL_SECONDS)

    def _read(self, published: Statement, statements: Mapping[str, Statement]) -> None:
        """Take the decision that follows from statements, of which this process published one."""
        found = decide(statements, self.membership.start)
        epoch, own = found.epoch, self.identity
        self._is_hurried = any(each.is_ready or each.is_gone for each in statements.values())
        others = [each for identity, each in statements.items() if identity != own]
        self._is_left = all(other.epoch > published.epoch or other.is_gone for other in others)
        if published.is_gone:
            pass  # only the others decide
        elif found.refused.get(own, OTHER_CONFIG) != OTHER_CONFIG and self._waits_for_its_name:
            pass  # the one before may have died just now
        elif own in found.refused:
            self._other = statements[found.fitting[0]].address
            self._problem = found.refused[own]
            self._should_change = self._problem
        elif epoch is not None and own in epoch.members:
            self._statement = replace(
                self._statement, epoch=epoch.number, of=epoch.members, is_ready=False
            )
            self._statement = replace(self._statement, has_waited=False, suspects=())
            self._next = epoch
        elif published.is_ready:
            waited = time.monotonic() - self._ready_since
            suspects = found.waiting if waited > self.membership.deadline else ()
            self._statement = replace(
                self._statement, has_waited=waited > _GRACE_SECONDS, suspects=tuple(suspects)
            )
        elif self._should_change is None and self._next is None:
            self._should_change = self._find_reason(found, statements)
        self._changed.notify_all()

    @property
    def _waits_for_its_name(self) -> bool:
        return time.monotonic() - self._ready_since < _NAME_SECONDS

    def _find_reason(self, found: Decision, statements: Mapping[str, Statement]) -> str | None:
        """Return why this process should leave its epoch, or None."""
        own = statements[self.identity]
        ready = [each for each in found.fitting if statements[each].is_ready]
        joining = [name_of(each) for each in ready if each not in own.of]
        present = {identity for identity, each in statements.items() if not each.is_gone}
        gone = [name_of(each) for each in own.of if each not in present]
        if any(statement.epoch > own.epoch for statement in statements.values()):
            return "the others have begun another epoch"
        if gone:
            return f"{', '.join(gone)} left or died"
        if joining:
            return f"{', '.join(joining)} joins"
        return f"{', '.join(map(name_of, ready))} has left the epoch" if ready else None
