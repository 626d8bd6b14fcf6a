"""Communication between ranks: flat buckets, neighbor exchanges, consistency checks, groups."""

from .arguments import find_ddp_error, has_methods, summarize, wrong_type
from .buckets import FlatBuckets, Segment, assign_buckets, join_buckets
from .checkpointing import (
    clone_tensors_for_torch_save,
    is_creating_state,
    keys_of,
    plain_keys,
    plain_name,
    uncompiled,
    with_own_storage,
)
from .collectives import Collectives
from .comm_stats import CommStats
from .consistency import (
    ArgumentTypeError,
    DisagreementError,
    check_consistent_across_ranks,
    first_difference,
)
from .errors import PeerError, RemoteError, peer_error
from .gossip_rounds import NeighborExchange, PendingExchange, Transfer
from .model_averager import ModelAverager, WrappedAverager
from .p2p_channel import Channel
from .p2p_groups import P2PGroups
from .process_groups import (
    barrier_of,
    check_group_exists,
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
    "check_group_exists",
    "clone_tensors_for_torch_save",
    "counterparts_of",
    "device_of",
    "find_ddp_error",
    "find_format_error",
    "first_difference",
    "has_methods",
    "is_creating_state",
    "join_buckets",
    "keys_of",
    "new_group",
    "node_of",
    "peer_error",
    "plain_keys",
    "plain_name",
    "summarize",
    "tensors_of",
    "timeout_of",
    "uncompiled",
    "warn_if_alone",
    "with_own_storage",
    "wrong_type",
]
