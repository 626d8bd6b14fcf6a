"""The messages of a round as arrays, and its mixing matrix as a sparse one."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Edges:
    """A round as a sparse mixing matrix: the (m,) messages, and what each of n ranks keeps."""

    senders: np.ndarray  # int64
    receivers: np.ndarray  # int64
    shares: np.ndarray  # float64
    kept: np.ndarray  # (n,) float64

    @staticmethod
    def of(senders: np.ndarray, receivers: np.ndarray, shares: np.ndarray, n: int) -> "Edges":
        """Return the edges of messages between n ranks."""
        return Edges(senders, receivers, shares, 1 - np.bincount(senders, shares, minlength=n))

    def sent(self, values: np.ndarray) -> np.ndarray:
        """Return what each rank receives, (n, c), if the ranks hold (n, c) values."""
        result = np.empty_like(values)
        for column in range(values.shape[1]):
            messages = self.shares * values[self.senders, column]
            result[:, column] = np.bincount(self.receivers, messages, minlength=len(values))
        return result

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Multiply the mixing matrix with (n, c) values."""
        result: np.ndarray = self.kept[:, None] * values + self.sent(values)
        return result
