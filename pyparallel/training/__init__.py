"""What trainers share: flat buckets, step hooks, averagers, the format of states, arguments."""

from .algorithm import Algorithm, Place
from .arguments import find_ddp_error, has_methods, summarize, wrong_type
from .averager import ModelAverager, SavedProgress, Status, Traits
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
from .state_checks import (
    check_like,
    check_on_all_ranks,
    check_optimizer_kinds,
    check_optimizer_state,
    load_copy,
    optimizer_kind,
    read_checkpoint,
    read_metadata,
)
from .state_format import CHECKSUMS_KEY, FORMAT, FORMAT_KEY, check_format, checksum, seal
from .step_hook import StepHook, StepHooks

__all__ = [
    "CHECKSUMS_KEY",
    "FORMAT",
    "FORMAT_KEY",
    "Algorithm",
    "FlatBuckets",
    "ModelAverager",
    "Place",
    "SavedProgress",
    "Segment",
    "Status",
    "StepHook",
    "StepHooks",
    "Traits",
    "assign_buckets",
    "check_format",
    "check_like",
    "check_on_all_ranks",
    "check_optimizer_kinds",
    "check_optimizer_state",
    "checksum",
    "clone_tensors_for_torch_save",
    "find_ddp_error",
    "has_methods",
    "is_creating_state",
    "join_buckets",
    "keys_of",
    "load_copy",
    "optimizer_kind",
    "plain_keys",
    "plain_name",
    "read_checkpoint",
    "read_metadata",
    "seal",
    "summarize",
    "uncompiled",
    "with_own_storage",
    "wrong_type",
]
