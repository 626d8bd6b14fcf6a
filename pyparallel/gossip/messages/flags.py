"""Flags that ranks raise for each other in a process group's store."""

from typing import Protocol

from ...comm import PeerError

# A flag counts in two bits: it may be raised again after a look has read it and before the next
# look has cleared it. 31 flags leave the sign bit of the store's 64-bit counters alone.
_BITS_PER_FLAG = 2
_FLAGS_PER_WORD = 31
_END = 1 << _BITS_PER_FLAG * _FLAGS_PER_WORD  # above every counter


class CountingStore(Protocol):
    """The store interface of `Flags`; `DeadlineStore` has it, and so have torch's stores."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which starts at 0, atomically; return its new value."""


class Flags:
    """Flags that this rank raises for others, and those that others raise for it.

    Gloo cannot tell whether a message has arrived, and closes the connection when a wait times out.
    A rank that must not block polls a flag first.

    All flags of a rank are packed into counters of the store, 31 in each, so raising one is a
    single store call, and so is polling up to 31. Do not raise a flag twice between two polls of
    its receiver: wait for an answer first.
    """

    def __init__(self, store: CountingStore, rank: int, num_flags: int) -> None:
        self._store = store
        self._rank = rank
        self._num_flags = num_flags
        self._seen = [0] * -(-num_flags // _FLAGS_PER_WORD)

    def raise_for(self, peer: int, flag: int) -> None:
        """Raise ``flag`` for ``peer``, to be returned by its next ``look``."""
        word, place = divmod(flag, _FLAGS_PER_WORD)
        self._add(peer, word, 1 << _BITS_PER_FLAG * place)

    def look(self) -> list[int]:
        """Return the flags raised for this rank since its last look, ascending."""
        found: list[int] = []
        for word, seen in enumerate(self._seen):
            raised = self._add(self._rank, word, -seen)  # clears what the last look has read
            self._seen[word] = raised
            found += [word * _FLAGS_PER_WORD + place for place in _places(raised)]
            if not 0 <= raised < _END or (found and found[-1] >= self._num_flags):
                raise self.foreign_error(f"flags {found} and a count of {raised}")
        return found

    def foreign_error(self, what: str) -> PeerError:
        """Return the error of a flag that no rank raises."""
        return PeerError(
            f"rank {self._rank}: only ranks of the process group may write to its store, got "
            f"{what}; does another process, or another version of pyparallel, use the store?"
        )

    def _add(self, rank: int, word: int, amount: int) -> int:
        return self._store.add(f"flags/{rank}/{word}", amount)


def _places(word: int) -> list[int]:
    """Return the indices of the raised flags in a counter."""
    if word == 0:  # nearly always
        return []
    return [place for place in range(_FLAGS_PER_WORD) if word >> _BITS_PER_FLAG * place & 3]
