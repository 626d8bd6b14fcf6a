"""Communication compression: compressors, their state, and hooks for DDP and FSDP2."""

from typing import TYPE_CHECKING, Any

from .. import _deprecated
from ..comm.collectives import Collectives
from ..comm.comm_stats import CommStats
from .compressor import AttachPoint, Compressor, Message
from .corrupt_messages import CorruptMessageError
from .hooks import GradientCompression, compressed_hook, ddp_hook
from .layout import BufferLayout, Piece
from .low_rank import AutoEncoder, ConvAutoEncoder, Learned, PowerSGD
from .quantizers import QSGD, Cast, Fp8, Int4, Int8, Natural, Sign, Ternary
from .sparsifiers import (
    DGC,
    Diagonal,
    HeterogeneousPermK,
    PermK,
    RandomK,
    ScaledPermK,
    Threshold,
    TopK,
)
from .state import CompressorState
from .state_store import StateStore, merge_states
from .wrappers import Chain, ErrorFeedback, Finite, NonFiniteError, PerParameter, Switch

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


_deprecated.install(__name__)
