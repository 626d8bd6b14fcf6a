"""Communication compression: compressors, their state, and hooks for DDP and FSDP2."""

from typing import TYPE_CHECKING, Any

from ..comm.collectives import Collectives
from ..comm.errors import NonFiniteError
from ..comm.stats import CommStats
from . import low_rank, quantizers, sparsifiers, wrappers
from .compressor import AttachPoint, Compressor, Message
from .corrupt_messages import CorruptMessageError
from .hooks import GradientCompression, compress_ddp
from .layout import BufferLayout, Piece
from .low_rank import *  # noqa: F403  the compressors that each folder exports
from .quantizers import *  # noqa: F403  likewise
from .sparsifiers import *  # noqa: F403  likewise
from .state import CompressorState
from .state_store import StateStore, merge_states
from .wrappers import *  # noqa: F403  likewise

if TYPE_CHECKING:
    from .hooks.fsdp import FSDPCompression, compress_fsdp, fsdp_all_gather, fsdp_reduce_scatter
    from .hooks.fsdp_custom import CompressedAllGather, CompressedReduceScatter

__all__ = [
    "AttachPoint",
    "BufferLayout",
    "Collectives",
    "CommStats",
    "CompressedAllGather",
    "CompressedReduceScatter",
    "Compressor",
    "CompressorState",
    "CorruptMessageError",
    "FSDPCompression",
    "GradientCompression",
    "Message",
    "NonFiniteError",
    "Piece",
    "StateStore",
    "compress_ddp",
    "compress_fsdp",
    "fsdp_all_gather",
    "fsdp_reduce_scatter",
    "merge_states",
]
__all__ += low_rank.__all__
__all__ += quantizers.__all__
__all__ += sparsifiers.__all__
__all__ += wrappers.__all__


def __getattr__(name: str) -> Any:
    """Import the hooks of FSDP2 when one is used: torch.distributed.fsdp takes long to import."""
    if name in __all__:
        from .hooks import fsdp

        return getattr(fsdp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
