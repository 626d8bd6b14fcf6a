"""Messages of fewer bytes: compressors, what they remember, and where they attach."""

from .cast import Cast
from .compressor import AttachPoint, Compressor, Message
from .corruption import CorruptMessageError
from .ddp import GradientCompression, compressed_hook, ddp_hook
from .error_feedback import ErrorFeedback
from .fsdp import (
    CompressedAllGather,
    CompressedReduceScatter,
    FSDPCompression,
    compress_fsdp,
    fsdp_all_gather,
    fsdp_reduce_scatter,
)
from .layout import Layout, Piece
from .memory import Memory, merge_states
from .meter import Meter
from .quantized import Int8
from .ranks import Ranks
from .state import State
from .top_k import TopK

__all__ = [
    "AttachPoint",
    "Cast",
    "CompressedAllGather",
    "CompressedReduceScatter",
    "Compressor",
    "CorruptMessageError",
    "ErrorFeedback",
    "FSDPCompression",
    "GradientCompression",
    "Int8",
    "Layout",
    "Memory",
    "Message",
    "Meter",
    "Piece",
    "Ranks",
    "State",
    "TopK",
    "compress_fsdp",
    "compressed_hook",
    "ddp_hook",
    "fsdp_all_gather",
    "fsdp_reduce_scatter",
    "merge_states",
]
