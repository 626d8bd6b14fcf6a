"""Moving tensors between ranks: flat buckets, rounds of messages, agreement.  No training idea."""

from . import teardown as teardown
from .agreement import DisagreementError, agree, first_difference
from .buckets import FlatBuckets
from .exchange import Exchange, PeerError, Round, Transfer
from .flags import Flags
from .groups import counterparts_of, deadline_of, new_group, node_of
from .meeting import meeting_of

__all__ = [
    "DisagreementError",
    "Exchange",
    "Flags",
    "FlatBuckets",
    "PeerError",
    "Round",
    "Transfer",
    "agree",
    "counterparts_of",
    "deadline_of",
    "first_difference",
    "meeting_of",
    "new_group",
    "node_of",
]
