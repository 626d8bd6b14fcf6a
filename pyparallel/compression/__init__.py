"""Communication compression: compressors, their state, and hooks for DDP and FSDP2."""

from typing import TYPE_CHECKING, Any

from ..comm.collectives import Collectives
from ..comm.comm_stats import CommStats
from .compressor import AttachPoint, Compressor, Message
from .hooks.ddp import GradientCompression, compressed_hook, ddp_hook
from .layout import BufferLayout, Piece
from .low_rank.auto_encoder import AutoEncoder, ConvAutoEncoder
from .low_rank.learned import Learned
from .low_rank.power_sgd import PowerSGD
from .quantizers.cast import Cast
from .quantizers.int_fp8 import Fp8, Int4, Int8
from .quantizers.natural import Natural
from .quantizers.qsgd import QSGD
from .quantizers.sign import Sign
from .quantizers.ternary import Ternary
from .sparsifiers.dgc import DGC
from .sparsifiers.diagonal import Diagonal
from .sparsifiers.perm_k import PermK
from .sparsifiers.random_k import RandomK
from .sparsifiers.scaled_perm_k import HeterogeneousPermK, ScaledPermK
from .sparsifiers.threshold import Threshold
from .sparsifiers.top_k import TopK
from .state import CompressorState
from .state_store import StateStore, merge_states
from .validation import CorruptMessageError
from .wrappers.chain import Chain
from .wrappers.error_feedback import ErrorFeedback
from .wrappers.finite import Finite, NonFiniteError
from .wrappers.per_parameter import PerParameter
from .wrappers.switch import Switch

if TYPE_CHECKING:
    from .hooks.fsdp import (
        CompressedAllGather,
        CompressedReduceScatter,
        FSDPCompression,
        compress_fsdp,
        fsdp_all_gather,
        fsdp_reduce_scatter,
    )

__all__ = [
    "DGC",
    "QSGD",
    "AttachPoint",
    "AutoEncoder",
    "BufferLayout",
    "Cast",
    "Chain",
    "Collectives",
    "CommStats",
    "CompressedAllGather",
    "CompressedReduceScatter",
    "Compressor",
    "CompressorState",
    "ConvAutoEncoder",
    "CorruptMessageError",
    "Diagonal",
    "ErrorFeedback",
    "FSDPCompression",
    "Finite",
    "Fp8",
    "GradientCompression",
    "HeterogeneousPermK",
    "Int4",
    "Int8",
    "Learned",
    "Message",
    "Natural",
    "NonFiniteError",
    "PerParameter",
    "PermK",
    "Piece",
    "PowerSGD",
    "RandomK",
    "ScaledPermK",
    "Sign",
    "StateStore",
    "Switch",
    "Ternary",
    "Threshold",
    "TopK",
    "compress_fsdp",
    "compressed_hook",
    "ddp_hook",
    "fsdp_all_gather",
    "fsdp_reduce_scatter",
    "merge_states",
]


def __getattr__(name: str) -> Any:
    """Import the hooks of FSDP2 when one is used: torch.distributed.fsdp takes long to import."""
    if name in __all__:
        from .hooks import fsdp

        return getattr(fsdp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
