"""The room for payloads behind headers: how many bytes, as both ends of a channel know."""

from collections import deque

PREFETCH_DEPTH = 2  # messages whose receives are posted ahead, so that transfers overlap compute
INLINE_BYTES = 1 << 18  # payloads up to this are copied behind their headers: one message, not two


class InlineRoom:
    """The most bytes of payload behind the header of each message, counted alike at both ends.

    A receive is posted while fewer than ``PREFETCH_DEPTH`` messages before it have not arrived, so
    its size may depend on those before them: it has room for the longest.
    """

    def __init__(self) -> None:
        self._lengths: deque[int] = deque()  # of payloads that were not counted yet
        self._num_counted = 0
        self._longest = 0

    def add(self, length: int) -> None:
        """Add the next message's payload."""
        self._lengths.append(length if length <= INLINE_BYTES else 0)

    def of(self, index: int) -> int:
        """Return the capacity of a message; indices must not descend."""
        while self._num_counted <= index - PREFETCH_DEPTH:
            self._longest = max(self._longest, self._lengths.popleft())
            self._num_counted += 1
        return self._longest
