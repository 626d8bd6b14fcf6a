"""Bytes that a hook moves on its own device for each entry of a bucket, and its ops, on GPUs."""

import pytest
import torch

from pyparallel.compression import (
    BufferLayout,
    Collectives,
    ErrorFeedback,
    Int8,
    Piece,
    PowerSGD,
    Sign,
    TopK,
)
from pyparallel.compression.nonfinite import NonFiniteCheck
from pyparallel.ops import _corrupt
from tests.ops.op_counter import ByteCounter

NUMEL = 2**20
META = torch.device("meta")
LIMITS = [
    # compressor, bytes of an entry at most, ops, collectives of 8 ranks, by the policy
    (ErrorFeedback(TopK(0.01)), "raise", 18, 25, 1),
    (ErrorFeedback(TopK(0.01)), "skip", 22, 25, 1),
    (ErrorFeedback(Int8()), "raise", 24, 25, 2),
    (ErrorFeedback(Int8()), "skip", 28, 32, 2),
    (ErrorFeedback(Int8()), "allow", 24, 25, 2),
    (ErrorFeedback(Sign()), "raise", 30, 40, 2),
    (ErrorFeedback(PowerSGD(4)), "raise", 45, 40, 3),
]


class NoCollectives(Collectives):
    """Collectives of one of eight ranks that send nothing; what is received is of any value."""

    def __init__(self):
        super().__init__()
        self.size, self.num_calls = 8, 0

    def _run(self, *arguments, **options):
        self.num_calls += 1


class KnownCounter:
    """A GPU's counter of corrupt entries after its first use."""

    def __init__(self):
        self.tensor = torch.zeros((), dtype=torch.int64, device=META)

    def num_unreported(self):
        return 0


@pytest.mark.parametrize(("compressor", "policy", "num_bytes", "num_ops", "num_calls"), LIMITS)
def test_a_bucket_takes_few_bytes_ops_and_collectives(
    compressor, policy, num_bytes, num_ops, num_calls, monkeypatch
):
    monkeypatch.setattr(_corrupt, "_is_counted", lambda like: True)
    monkeypatch.setattr(_corrupt, "_counters", {META: KnownCounter()})
    layout, collectives = BufferLayout((Piece("matrix", (1024, NUMEL // 1024)),)), NoCollectives()
    state, x = compressor.init(layout, META), torch.empty(NUMEL, device=META)
    check = NonFiniteCheck(policy)
    with ByteCounter() as counter:
        check.mean_(compressor, x, layout, lambda: state, collectives, 0)
    assert counter.num_bytes / NUMEL <= num_bytes
    assert counter.num_ops <= num_ops
    assert collectives.num_calls == num_calls
