"""The ledger of push-sum mass: what was sent, what was merged, and what that means at a change.

Weights here are in units in which mass is neither made nor destroyed: an epoch scales them so that
its members' sum is their number. ``2**exponent`` such units are one, so that they can get small for
ever; powers of two do not round.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

_TOLERANCE = 1e-9  # of masses in float64, relative to all


@dataclass
class Account:
    """What a rank publishes when an epoch begins.

    Args:
        weight: push-sum weight, without the mass in ``sent``; 0 of a rank that has none yet.
        exponent: of the unit.
        epoch: in which ``sent`` was sent, and its ``round``.
        sent: mass of the message to each receiver that has not acknowledged it.
        merged: for each of the last epochs, the last round whose message was merged, by sender.
        settled: the last epoch whose beginning this rank has completed, after which all members'
            mass, messages included, was ``total``.
    """

    weight: float = 0.0
    exponent: int = 0
    epoch: int = 0
    round: int = -1
    sent: dict[str, float] = field(default_factory=dict)
    merged: dict[str, dict[str, int]] = field(default_factory=dict)
    settled: int = 0
    total: float = 0.0

    def send(self, epoch: int, round_index: int, sent: dict[str, float], kept: float) -> None:
        """Note the messages of a round, and the weight that is kept."""
        self.epoch, self.round, self.sent, self.weight = epoch, round_index, sent, kept

    def merge(self, epoch: int, round_index: int, senders: Iterable[str], weight: float) -> None:
        """Note whose messages of a round were merged, and the weight then."""
        merged = self.merged.setdefault(str(epoch), {})
        merged.update(dict.fromkeys(senders, round_index))
        self.weight = weight

    def has_merged(self, epoch: int, round_index: int, sender: str) -> bool:
        """Return whether the message of a round, or of a later one, was merged."""
        return self.merged.get(str(epoch), {}).get(sender, -1) >= round_index

    def in_unit(self, exponent: int) -> "Account":
        """Return the account in another unit."""
        shift = exponent - self.exponent
        return Account(
            math.ldexp(self.weight, shift),
            exponent,
            self.epoch,
            self.round,
            {peer: math.ldexp(mass, shift) for peer, mass in self.sent.items()},
            self.merged,
            self.settled,
            math.ldexp(self.total, shift),
        )


@dataclass(frozen=True)
class Settlement:
    """What all members of an epoch have once unmerged messages are back with their senders.

    Args:
        exponent: of the unit of the masses.
        weights: of each member; 0: it joins.
        returned: mass that comes back to each member.
        total: of all members.
        lost: of members that are gone, of those that were left behind, and of what was sent to them
            and merged; 0 if nobody knows what there was before.
    """

    exponent: int
    weights: dict[str, float]
    returned: dict[str, float]
    total: float
    lost: float


def settle(accounts: Mapping[str, Account], veterans: Collection[str]) -> Settlement:
    """Return what members have, from the accounts of all of them, equal on all that compute it.

    ``veterans`` were in the epoch before. A member that was not has been left behind: what it holds
    is lost, and what was sent to it has gone back already, or goes back now.
    """
    exponent = max(account.exponent for account in accounts.values())
    ledger = {key: each.in_unit(exponent) for key, each in accounts.items()}
    weights, returned = dict.fromkeys(ledger, 0.0), dict.fromkeys(ledger, 0.0)
    for member in sorted(set(ledger).intersection(veterans)):
        own = ledger[member]
        for receiver, mass in own.sent.items():
            is_there = receiver in ledger and receiver in veterans
            if not (is_there and ledger[receiver].has_merged(own.epoch, own.round, member)):
                returned[member] += mass
        weights[member] = own.weight + returned[member]
    total = math.fsum(weights.values())
    before = max(ledger.values(), key=lambda each: each.settled)
    lost = before.total - total if before.settled and total else 0.0
    if lost < -_TOLERANCE * total:
        raise RuntimeError(
            f"push-sum mass must not grow when members change, got {total} after {total + lost}"
        )
    lost = lost if lost > _TOLERANCE * total else 0.0
    if total:
        shift = -math.frexp(total)[1]
        exponent += shift
        weights = {key: math.ldexp(each, shift) for key, each in weights.items()}
        returned = {key: math.ldexp(each, shift) for key, each in returned.items()}
        total, lost = math.ldexp(total, shift), math.ldexp(lost, shift)
    return Settlement(exponent, weights, returned, total, lost)
