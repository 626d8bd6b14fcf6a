"""Moving tensors between ranks: flat buckets, rounds of messages, agreement.  No training idea."""

from . import teardown as teardown
from .agreement import DisagreementError, agree
from .buckets import FlatBuckets
from .exchange import Exchange, PeerError, Round, Transfer
from .groups import counterparts_of, new_group, node_of

__all__ = [
    "DisagreementError",
    "Exchange",
    "FlatBuckets",
    "PeerError",
    "Round",
    "Transfer",
    "agree",
    "counterparts_of",
    "new_group",
    "node_of",
]
