"""The interface of a service that knows which processes train together."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from ...training.arguments import check_integer, check_type, is_number, require


@dataclass(frozen=True)
class Change:
    """What ``on_change`` is called with, on every member, once the members of an epoch are set.

    Args:
        epoch: its number, from 1.
        members: the names of its members, in the order of their ranks.
        joined: those of them that were not in the epoch before.
        left: the names of those that were, and are gone.
        lost: share of all push-sum mass, in [0, 1), that was lost with members that are gone; 0
            with outer steps, which have none.
        returned: share that came back to this rank, of messages that nobody has merged.
        reason: why this rank has left the epoch before.
    """

    epoch: int
    members: tuple[str, ...]
    joined: tuple[str, ...]
    left: tuple[str, ...]
    lost: float
    returned: float
    reason: str


class Membership(ABC):
    """Tells processes which of them are alive, so that they train together in epochs.

    A subclass implements ``open``, ``poll`` and ``close`` with a service such as torchft's
    lighthouse (`Lighthouse`); what the processes agree on is the trainer's matter. ``hint`` says
    what to check while the service does not respond.

    Args:
        name: of this process, unique among those alive, such as "replica-3".
        start: processes to wait for before the first epoch; later ones are joined.
        deadline: seconds after which a member that does not respond is left behind: more than the
            longest time between two steps, evaluation and checkpoints included; with outer steps
            more than any member waits for the slowest at one.
        on_change: called with a `Change` at the beginning of each epoch; None: print it.
        leaves_on_sigterm: a SIGTERM makes this process leave after its step, before it ends.
    """

    hint = ""

    def __init__(
        self,
        name: str,
        *,
        start: int = 1,
        deadline: float = 10.0,
        on_change: Callable[[Change], object] | None = None,
        leaves_on_sigterm: bool = True,
    ) -> None:
        check_type("name", name, str, "a text such as 'replica-3'")
        require(bool(name) and ":" not in name, "name must be a text without colons", repr(name))
        check_integer("start", start)
        rule = "deadline must be a positive and finite number of seconds"
        require(is_number(deadline) and 0 < deadline < math.inf, rule, repr(deadline))
        self.name, self.start, self.deadline = name, start, float(deadline)
        self.on_change, self.leaves_on_sigterm = on_change, leaves_on_sigterm

    @abstractmethod
    def open(self, identity: str) -> str:
        """Begin to be alive under an identity, ``name:`` and a text that no other process has.

        Return the address under which other machines reach this one, such as "10.0.0.7".
        """

    @abstractmethod
    def poll(self, text: str) -> dict[str, str] | None:
        """Publish a text; wait until all that are alive do, and return their texts, by identity.

        Called again and again by one thread. All calls that return together return the same, this
        process's text among them. A process that is alive and does not poll may be waited for. None
        after a while in which the service has not responded.
        """

    @abstractmethod
    def close(self) -> None:
        """Be alive no more, so that others do not wait for this process."""
