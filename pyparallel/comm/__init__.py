"""Moving tensors between ranks: flat buckets, rounds of messages, agreement.  No training idea."""

from . import teardown as teardown
from .agreement import DisagreementError, agree, first_difference
from .buckets import FlatBuckets
from .channel import Channel, PeerFailedError, Wires
from .exchange import Exchange, PeerError, Round, Transfer
from .flags import Flags
from .groups import counterparts_of, deadline_of, new_group, node_of
from .meeting import meeting_of
from .parcel import Value, tensors_of

__all__ = [
    "Channel",
    "DisagreementError",
    "Exchange",
    "Flags",
    "FlatBuckets",
    "PeerError",
    "PeerFailedError",
    "Round",
    "Transfer",
    "Value",
    "Wires",
    "agree",
    "counterparts_of",
    "deadline_of",
    "first_difference",
    "meeting_of",
    "new_group",
    "node_of",
    "tensors_of",
]
