"""Messages of fewer bytes: compressors, what they remember, and where they attach."""

from .cast import Cast
from .compressor import AttachPoint, Compressor, Message
from .corruption import CorruptMessageError
from .ddp import GradientCompression, compressed_hook, ddp_hook
from .error_feedback import ErrorFeedback
from .layout import Layout, Piece
from .memory import Memory, merge_states
from .meter import Meter
from .power_sgd import PowerSGD
from .quantized import Int8
from .ranks import Ranks
from .state import State
from .top_k import TopK

__all__ = [
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
    "Piece",
    "PowerSGD",
    "Ranks",
    "State",
    "TopK",
    "compressed_hook",
    "ddp_hook",
    "merge_states",
]
