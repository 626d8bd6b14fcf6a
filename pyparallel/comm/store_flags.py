"""Flags that ranks raise for each other: news that can be looked for without waiting for it.

Gloo does not tell whether a message has arrived, and closes the pair of ranks when a wait for one
runs out of time. So who must not wait looks for a flag first.
"""

from typing import Protocol

from .gossip_rounds import PeerError

# A flag counts in two bits: it may be raised again after a look has seen it and before the next
# look has lowered it. 31 of them leave the sign of the store's 64-bit counters alone.
_BITS_PER_FLAG = 2
_FLAGS_PER_WORD = 31


class CountingStore(Protocol):
    """What flags need of a store; torch's TCPStore, FileStore and HashStore have it."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which begins at 0, in one indivisible step; what it is then."""


class Flags:
    """The flags that a rank raises for others, and those that others raise for it.

    All flags of a rank lie in counters of the store, 31 in each, so that raising one is a single
    call to the store, and so is a look at up to 31. A flag must not be raised twice between two
    looks of the rank it is raised for: let there be an answer to it before the next.

    Args:
        store: where the counters are, such as that of a process group; the same for all ranks, and
            with no other flags in it.
        rank: the rank whose flags ``look`` finds.
        num_flags: how many different flags others may raise for this rank.
    """

    def __init__(self, store: CountingStore, rank: int, num_flags: int) -> None:
        self._store = store
        self._rank = rank
        self._seen = [0] * -(-num_flags // _FLAGS_PER_WORD)

    def raise_for(self, peer: int, flag: int) -> None:
        """Let the next look of ``peer`` find ``flag``.

        Raises:
            PeerError: the store is gone.
        """
        word, place = divmod(flag, _FLAGS_PER_WORD)
        self._add(peer, word, 1 << _BITS_PER_FLAG * place)

    def look(self) -> list[int]:
        """The flags raised for this rank since its last look, ascending.

        Raises:
            PeerError: the store is gone.
        """
        found = []
        for word, seen in enumerate(self._seen):
            raised = self._add(self._rank, word, -seen)  # lowers what the last look has seen
            self._seen[word] = raised
            found += [word * _FLAGS_PER_WORD + place for place in _places(raised)]
        return found

    def _add(self, rank: int, word: int, amount: int) -> int:
        try:
            return self._store.add(f"pyparallel/flags/{rank}/{word}", amount)
        except RuntimeError as error:
            raise PeerError(
                f"rank {self._rank}: the process group's store did not answer: the process that "
                f"keeps it (the launcher, or rank 0) died ({str(error).splitlines()[0]})"
            ) from error


def _places(word: int) -> list[int]:
    """Which flags of a word are up."""
    if word == 0:  # nearly always
        return []
    return [place for place in range(_FLAGS_PER_WORD) if word >> _BITS_PER_FLAG * place & 3]
