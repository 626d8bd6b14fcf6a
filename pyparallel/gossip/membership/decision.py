"""What processes say to each other through a `Membership`, and what follows: the next epoch.

Each publishes a `Statement` in every poll. All that see the same statements come to the same
decision, so nothing else is exchanged, and no process decides for others.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

OTHER_CONFIG = "a process that joins must have the members' configuration"


@dataclass(frozen=True)
class Statement:
    """What a process publishes.

    Args:
        address: of its machine, and the port of its store.
        config: a digest of the (name, value) pairs that members must share; its store has them.
        epoch: the last one that it has begun, 0: none, and its members, ``of``.
        is_ready: it has left that epoch, and waits for the next one.
        leaves: it sends its mass to others in the next epoch, and is in none after it.
        is_gone: it has done so.
        has_waited: it has then waited for a while.
        suspects: members for which it has then waited longer than the deadline.
    """

    address: tuple[str, int]
    config: str = ""
    epoch: int = 0
    of: Sequence[str] = ()
    is_ready: bool = False
    leaves: bool = False
    is_gone: bool = False
    has_waited: bool = False
    suspects: Sequence[str] = ()

    def to_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, text: str) -> "Statement":
        """Return the statement of a text."""
        found = json.loads(text)
        host, port = found.pop("address")
        return cls((host, port), **found)


@dataclass(frozen=True)
class Epoch:
    """An epoch: its number, the identities of its members by rank, and the address of its store.

    ``veterans`` are the members that were in the epoch before; ``before`` are all of that one.
    With members that are ``leaving`` it is only for them to do so.
    """

    number: int
    members: tuple[str, ...]
    address: tuple[str, int]
    veterans: frozenset[str] = frozenset()
    before: tuple[str, ...] = ()
    leaving: frozenset[str] = frozenset()


class Decision(NamedTuple):
    """What statements come to: the next epoch, or None; processes that fit; refused ones and why.

    ``waiting`` are those that fit and have not left their epoch.
    """

    epoch: Epoch | None
    fitting: Sequence[str]
    waiting: Sequence[str]
    refused: Mapping[str, str]


def decide(statements: Mapping[str, Statement], start: int) -> Decision:
    """Decide on the next epoch; equal on all processes that have the same statements.

    The members of the newest epoch stay; others must have their configuration, and another name.
    """
    newest = max(statement.epoch for statement in statements.values())
    before = next(each.of for each in statements.values() if each.epoch == newest)
    present = sorted(identity for identity, each in statements.items() if not each.is_gone)
    veterans = [identity for identity in present if identity in before]
    others = [identity for identity in present if identity not in before]
    fitting: list[str] = []
    refused: dict[str, str] = {}
    for identity in [*veterans, *others]:
        problem = _find_problem(identity, fitting, statements)
        if problem is None:
            fitting.append(identity)
        else:
            refused[identity] = problem
    ready = [identity for identity in fitting if statements[identity].is_ready]
    # A process that was left behind, or that joins, neither waits for members nor is waited for.
    judges = [identity for identity in ready if identity in before or newest == 0]
    suspects = {suspect for identity in judges for suspect in statements[identity].suspects}
    waiting = [each for each in fitting if each in before and each not in {*ready, *suspects}]
    # Heartbeats may be late on a busy machine, and most members may not be dead at once.
    remaining = sum(1 for each in before if each in present or each not in statements)
    is_small = 2 * len(judges) < remaining and not all(statements[e].has_waited for e in judges)
    if newest == 0:
        is_small = len(ready) < start
    epoch = None
    if ready and not waiting and not is_small:
        members = tuple(sorted(ready))
        address = statements[members[0]].address
        staying = frozenset(members).intersection(before)
        leaving = frozenset(member for member in members if statements[member].leaves)
        epoch = Epoch(newest + 1, members, address, staying, tuple(before), leaving)
    return Decision(epoch, fitting, waiting, refused)


def name_of(identity: str) -> str:
    """Return the name in an identity."""
    return identity.partition(":")[0]


def _find_problem(
    identity: str, fitting: Sequence[str], statements: Mapping[str, Statement]
) -> str | None:
    """Return why a process does not fit those before it, or None."""
    if not fitting:
        return None
    name = name_of(identity)
    if name in map(name_of, fitting):
        return (
            f"name must be of one process, got a second one with {name!r}; give each another name, "
            "or wait until the first has ended"
        )
    if statements[identity].config != statements[fitting[0]].config:
        return OTHER_CONFIG
    return None
