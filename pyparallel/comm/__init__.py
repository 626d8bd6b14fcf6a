"""Communication between ranks: process groups, collectives, consistency checks, errors."""

from .collectives import Collectives
from .consistency import (
    ArgumentTypeError,
    DisagreementError,
    check_consistent_across_ranks,
    first_difference,
    gather_json,
)
from .counts import ANY, Call, StepCounts
from .errors import NonFiniteError, PeerError, RemoteError, without_traceback
from .p2p import Pending, PointToPoint, Transfer
from .process_groups import device_of, warn_if_alone
from .rendezvous import wait_for_store
from .run import Run
from .stats import CommStats
from .store import store_of, timeout_of

__all__ = [
    "ANY",
    "ArgumentTypeError",
    "Call",
    "Collectives",
    "CommStats",
    "DisagreementError",
    "NonFiniteError",
    "PeerError",
    "Pending",
    "PointToPoint",
    "RemoteError",
    "Run",
    "StepCounts",
    "Transfer",
    "check_consistent_across_ranks",
    "device_of",
    "first_difference",
    "gather_json",
    "store_of",
    "timeout_of",
    "wait_for_store",
    "warn_if_alone",
    "without_traceback",
]
