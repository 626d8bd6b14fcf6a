"""Bytes that a rank sends, and seconds for which it encodes, decodes and waits."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor


@dataclass
class CommStats:
    """Bytes and seconds that one step has cost this rank.

    Args:
        payload_bytes: bytes of the messages that this rank encoded, each counted once.
        wire_bytes: bytes sent, assuming ring or pairwise collectives.
        encode_seconds: host time to encode.
        decode_seconds: host time to decode.
        waiting_seconds: host time in collectives and waits for messages; on NCCL only to queue.
    """

    payload_bytes: int = 0
    wire_bytes: float = 0.0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    waiting_seconds: float = 0.0

    def count(self, tensor: Tensor, times: float) -> None:
        """Add a tensor that is sent ``times`` times."""
        num_bytes = tensor.numel() * tensor.element_size()  # a sparse tensor has no nbytes
        self.payload_bytes += num_bytes
        self.wire_bytes += num_bytes * times

    def count_bytes(self, num_bytes: float) -> None:
        """Add bytes that were sent."""
        self.wire_bytes += num_bytes

    def count_wait(self, seconds: float) -> None:
        """Add host time in which this rank has waited for others."""
        self.waiting_seconds += seconds

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Count the time of the block as encoding."""
        begin = time.perf_counter()
        yield
        self.encode_seconds += time.perf_counter() - begin

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Count the time of the block as decoding."""
        begin = time.perf_counter()
        yield
        self.decode_seconds += time.perf_counter() - begin
