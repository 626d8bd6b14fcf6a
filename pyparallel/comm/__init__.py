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
from .collectives import Collectives, CommStats
from .consistency import (
    ArgumentTypeError,
    DisagreementError,
    check_consistent_across_ranks,
    first_difference,
)
from .errors import (
    NonFiniteError,
    PeerError,
    RemoteError,
    forget_trainer,
    without_traceback,
)
from .failures import peer_error, raising_peer_errors
from .gossip_rounds import NeighborExchange, PendingExchange, Transfer
from .message_header import ANY, MessageHeaders, RoundHeaders
from .model_averager import ModelAverager, WrappedAverager
from .p2p_channel import Channel
from .p2p_groups import P2PGroups
from .process_groups import (
    barrier_of,
    check_group_exists,
    counterparts_of,
    device_of,
    new_group,
    new_trainer_group,
    node_of,
    warn_if_alone,
)
from .state_format import (
    CHECKSUMS_KEY,
    FORMAT,
    FORMAT_KEY,
    check_format,
    check_like,
    check_on_all_ranks,
    check_optimizer_state,
    checksum,
    optimizer_kind,
    seal,
)
from .step_hook import (
    StepCounts,
    StepHook,
    StepHooks,
    refuse_other_optimizers,
)
from .store import Flags, store_of, timeout_of
from .wire_format import Value, tensors_of

__all__ = [
    "ANY",
    "CHECKSUMS_KEY",
    "FORMAT",
    "FORMAT_KEY",
    "ArgumentTypeError",
    "Channel",
    "Collectives",
    "CommStats",
    "DisagreementError",
    "Flags",
    "FlatBuckets",
    "MessageHeaders",
    "ModelAverager",
    "NeighborExchange",
    "NonFiniteError",
    "P2PGroups",
    "PeerError",
    "PendingExchange",
    "RemoteError",
    "RoundHeaders",
    "Segment",
    "StepCounts",
    "StepHook",
    "StepHooks",
    "Transfer",
    "Value",
    "WrappedAverager",
    "assign_buckets",
    "barrier_of",
    "check_consistent_across_ranks",
    "check_format",
    "check_group_exists",
    "check_like",
    "check_on_all_ranks",
    "check_optimizer_state",
    "checksum",
    "clone_tensors_for_torch_save",
    "counterparts_of",
    "device_of",
    "find_ddp_error",
    "first_difference",
    "forget_trainer",
    "has_methods",
    "is_creating_state",
    "join_buckets",
    "keys_of",
    "new_group",
    "new_trainer_group",
    "node_of",
    "optimizer_kind",
    "peer_error",
    "plain_keys",
    "plain_name",
    "raising_peer_errors",
    "refuse_other_optimizers",
    "seal",
    "store_of",
    "summarize",
    "tensors_of",
    "timeout_of",
    "uncompiled",
    "warn_if_alone",
    "with_own_storage",
    "without_traceback",
    "wrong_type",
]
