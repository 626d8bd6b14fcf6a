"""Which rank sends to which when members join or leave."""

from collections.abc import Sequence

from ..topology import Neighbors
from ..topology.base import uniform_share


def move_mass(rank: int, has_mass: Sequence[bool], leaving: Sequence[bool]) -> Neighbors | None:
    """Return the neighbors of a rank in the round that moves mass to and from ranks; None: none.

    Ranks that leave send all that they have to one that stays, if there are any. In another epoch
    ranks without mass, or without the members' state, receive from one each.
    """
    ranks = range(len(has_mass))
    staying = [each for each in ranks if not leaving[each]]
    if len(staying) < len(has_mass):
        senders = [each for each in ranks if leaving[each] and has_mass[each]]
        receivers = [each for each in staying if has_mass[each]] or staying
    else:
        receivers = [each for each in ranks if not has_mass[each]]
        senders = [each for each in ranks if has_mass[each]]
    if not (senders and receivers):
        return None
    longest = max(len(senders), len(receivers))
    is_leaving = len(staying) < len(has_mass)
    num_edges = len(senders) if is_leaving else len(receivers)
    edges = [
        (senders[index % len(senders)], receivers[index % len(receivers)])
        for index in range(min(longest, num_edges))
    ]
    to = tuple(receiver for sender, receiver in edges if sender == rank)
    shares = (1.0,) if is_leaving and to else (uniform_share(len(to)),) * len(to)
    return Neighbors(to, shares, tuple(sender for sender, receiver in edges if receiver == rank))
