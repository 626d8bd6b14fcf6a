"""Moving tensors between ranks: flat buckets, rounds of messages, agreement.  No training idea."""

from .buckets import FlatBuckets
from .consistency import DisagreementError, agree, first_difference
from .gossip_rounds import Exchange, PeerError, Round, Transfer
from .p2p_channel import Channel, PeerFailedError, Wires
from .process_groups import counterparts_of, deadline_of, meeting_of, new_group, node_of
from .store_flags import Flags
from .wire_format import Value, tensors_of

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
