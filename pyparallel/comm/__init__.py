"""Communication between ranks: flat buckets, neighbor exchanges, consistency checks, groups."""

from .arguments import find_ddp_error, has_methods, summarize, wrong_type
from .buckets import FlatBuckets, Segment, assign_buckets, join_buckets
from .collectives import Collectives
from .comm_stats import CommStats
from .consistency import (
    ArgumentTypeError,
    DisagreementError,
    check_consistent_across_ranks,
    first_difference,
)
from .errors import NonFiniteError, PeerError, RemoteError, peer_error
from .gossip_rounds import NeighborExchange, PendingExchange, Transfer
from .model_averager import ModelAverager, WrappedAverager
from .p2p_channel import Channel
from .p2p_groups import P2PGroups
from .process_groups import (
    barrier_of,
    counterparts_of,
    device_of,
    new_group,
    node_of,
    timeout_of,
    warn_if_alone,
)
from .state_format import FORMAT, FORMAT_KEY, check_format, find_format_error
from .step_hook import StepHook
from .store_flags import Flags
from .wire_format import Value, tensors_of

__all__ = [
    "FORMAT",
    "FORMAT_KEY",
    "ArgumentTypeError",
    "Channel",
    "Collectives",
    "CommStats",
    "DisagreementError",
    "Flags",
    "FlatBuckets",
    "ModelAverager",
    "NeighborExchange",
    "NonFiniteError",
    "P2PGroups",
    "PeerError",
    "PendingExchange",
    "RemoteError",
    "Segment",
    "StepHook",
    "Transfer",
    "Value",
    "WrappedAverager",
    "assign_buckets",
    "barrier_of",
    "check_consistent_across_ranks",
    "check_format",
    "counterparts_of",
    "device_of",
    "find_ddp_error",
    "find_format_error",
    "first_difference",
    "has_methods",
    "join_buckets",
    "new_group",
    "node_of",
    "peer_error",
    "summarize",
    "tensors_of",
    "timeout_of",
    "warn_if_alone",
    "wrong_type",
]
