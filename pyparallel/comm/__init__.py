"""Moving tensors between ranks: flat buckets, rounds of messages, agreement.  No training idea."""

from . import teardown as teardown
from .agreement import DisagreementError, agree, first_difference
from .buckets import FlatBuckets
from .exchange import Exchange, PeerError, Round, Transfer

__all__ = [
    "DisagreementError",
    "Exchange",
    "FlatBuckets",
    "PeerError",
    "Round",
    "Transfer",
    "agree",
    "first_difference",
]
