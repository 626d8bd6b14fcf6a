"""What compressed communication costs: bytes and seconds, since the last step began."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor


@dataclass
class CommStats:
    """What one step has cost this rank.

    Args:
        payload_bytes: of the messages that it made, each once.
        wire_bytes: that it sent, where collectives run around a ring or pairwise.
        encode_seconds: of the host, in making messages.
        decode_seconds: of the host, in reading them.
    """

    payload_bytes: int = 0
    wire_bytes: float = 0.0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0

    def count(self, tensor: Tensor, times: float) -> None:
        """A tensor that is sent so many times over."""
        num_bytes = tensor.numel() * tensor.element_size()
        self.payload_bytes += num_bytes
        self.wire_bytes += num_bytes * times

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """What runs inside counts as encoding."""
        begin = time.perf_counter()
        yield
        self.encode_seconds += time.perf_counter() - begin

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """What runs inside counts as decoding."""
        begin = time.perf_counter()
        yield
        self.decode_seconds += time.perf_counter() - begin
