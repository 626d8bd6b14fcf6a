"""Messages of fewer bytes: compressors, what they remember, and where they attach."""

from .cast import Cast
from .compressor import AttachPoint, Compressor, Message
from .corruption import CorruptMessageError
from .ddp import GradientCompression, compressed_hook, ddp_hook
from .dgc import DGC
from .error_feedback import ErrorFeedback
from .layout import Layout, Piece
from .memory import Memory, merge_states
from .meter import Meter
from .perm_k import PermK
from .quantized import Int8
from .random_k import RandomK
from .ranks import Ranks
from .state import State
from .threshold import Threshold
from .top_k import TopK

__all__ = [
    "DGC",
    "AttachPoint",
    "Cast",
    "Compressor",
    "CorruptMessageError",
    "ErrorFeedback",
    "GradientCompression",
    "Int8",
    "Layout",
    "Memory",
    "Message",
    "Meter",
    "PermK",
    "Piece",
    "RandomK",
    "Ranks",
    "State",
    "Threshold",
    "TopK",
    "compressed_hook",
    "ddp_hook",
    "merge_states",
]
